"""Bytes of LoRA adapters (arXiv:2106.09685): W' = W + (alpha / r) B A, with A of (r, inputs) and B of (outputs, r)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from latency_models.deployment.models import Model

TargetModule = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer that may have an adapter, by its name in Hugging Face checkpoints."""

TARGET_MODULES: tuple[TargetModule, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip

ROW_PARALLEL = ("o_proj", "down_proj")
"""Layers whose inputs are split over tensor-parallel ranks; the outputs of the others are."""

WEIGHT_BYTES = 2.0
"""Bytes of one weight of an adapter: vLLM keeps adapters in the model's type, 16 bits."""


def adapter_bytes(model: Model, rank: int, targets: Iterable[str], tensor_parallel: int = 1) -> float | None:
    """Bytes of one adapter on one device, split as in vLLM by default; None unless all layers are dense with GQA."""
    attention, ffn, hidden = model.attention, model.ffn, model.hidden_size
    if attention.kind != "gqa" or ffn.kind != "dense" or model.linear_attention or attention.output_gate:
        return None
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    shapes = {
        "q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (queries, hidden),
        "gate_proj": (hidden, ffn.intermediate_size), "up_proj": (hidden, ffn.intermediate_size),
        "down_proj": (ffn.intermediate_size, hidden),
    }  # fmt: skip
    widths = 0.0
    for name in set(targets):
        inputs, outputs = shapes[name]
        split, full = (inputs, outputs) if name in ROW_PARALLEL else (outputs, inputs)
        widths += split / tensor_parallel + full
    return model.layers * rank * widths * WEIGHT_BYTES
