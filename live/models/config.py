"""A model's config.json in Hugging Face's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from kernels.rope_kv_write import Llama3Scaling
from kernels.shapes import Shape
from latency_models.deployment.model_config import (
    MAX_COUNT,
    REFUSED_UNLESS,
    ConfigFields,
    attention_sizes,
    end_tokens,
    read_config_fields,
)

Family: TypeAlias = Literal["llama", "qwen3", "qwen3_moe"]

MAX_CONTEXT = 1 << 20
MAX_LABELS = 1 << 20

LABEL_HEAD = "ForSequenceClassification"
HEADS = ("ForCausalLM", LABEL_HEAD)
"""Endings of the names in `architectures` whose heads are supported."""

ROPE_FIELDS = {
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The supported kinds of rotary positions, each with its fields besides θ."""


@dataclass(frozen=True)
class Quantisation:
    """The packing of a checkpoint's linear weights.

    `group`: inputs that share a scale; -1: a row. `act_order`: inputs were quantised in the order of their activations,
    so that a group's are spread over the row (GPTQ's desc_act). `zero_offset`: added to stored zero points: GPTQ's
    first format subtracts 1.
    """

    method: Literal["awq", "gptq"]
    bits: int
    group: int
    symmetric: bool
    act_order: bool = False
    zero_offset: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """The settings of a model's forward pass.

    `tied`: the LM head is the embedding. `normalised_routing`: weights of the selected experts sum to 1. `labels`: of a
    classification model (`…ForSequenceClassification`), which has no LM head.
    """

    family: Family
    shape: Shape
    max_position_embeddings: int
    tied: bool
    scaling: Llama3Scaling | None = None
    normalised_routing: bool = True
    end_tokens: tuple[int, ...] = ()
    quantisation: Quantisation | None = None
    labels: tuple[str, ...] = ()


def read_config(path: Path) -> ModelConfig:
    """The config.json in a directory, or a file of that kind; `BadInput` for an unsupported family or variant."""
    file = path / "config.json" if path.is_dir() else path
    fields = read_config_fields(file, get_args(Family))
    family: Any = fields.document["model_type"]
    experts = _experts(fields) if family == "qwen3_moe" else 0
    heads, kv_heads, head_dim = attention_sizes(fields)
    theta, scaling = _rope(fields)
    shape = Shape(
        layers=fields.count("num_hidden_layers"),
        hidden=fields.count("hidden_size"),
        intermediate=fields.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=fields.count("vocab_size"),
        experts=experts,
        experts_per_token=fields.count("num_experts_per_tok") if experts else 0,
        expert_intermediate=fields.count("moe_intermediate_size") if experts else 0,
        qk_norm=family != "llama",
        epsilon=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
    )
    if shape.experts_per_token > experts:
        raise fields.fault("num_experts_per_tok", shape.experts_per_token, f"expected at most {experts}, all experts")
    return ModelConfig(
        family=family,
        shape=shape,
        max_position_embeddings=min(fields.count("max_position_embeddings"), MAX_CONTEXT),
        tied=fields.flag("tie_word_embeddings", False),
        scaling=scaling,
        normalised_routing=fields.flag("norm_topk_prob", False) if experts else True,
        end_tokens=end_tokens(fields),
        quantisation=_quantisation(fields.section("quantization_config")),
        labels=_labels(fields),
    )


def _experts(fields: ConfigFields) -> int:
    """The number of experts. Older files name the field num_experts, newer ones num_local_experts."""
    return fields.count("num_experts" if "num_experts" in fields.document else "num_local_experts")


def _rope(fields: ConfigFields) -> tuple[float, Llama3Scaling | None]:
    """The base θ and the scaling. As in transformers, an older file's `rope_scaling` precedes `rope_parameters`."""
    older, newer = fields.section("rope_scaling"), fields.section("rope_parameters")
    rope = older if older is not None and older.document else newer or ConfigFields({}, fields.file)
    kind = rope.document.get("rope_type", rope.document.get("type"))
    kind = "default" if kind is None else kind
    if kind not in tuple(ROPE_FIELDS):
        raise rope.fault("rope_type", kind, f"expected {' or '.join(ROPE_FIELDS)}")
    rope.refuse_unless("partial_rotary_factor", *REFUSED_UNLESS["partial_rotary_factor"])
    names = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_FIELDS[kind]}
    for name, value in rope.document.items():
        if name not in names and value is not None:
            raise rope.fault(name, value, f"expected none: rotary positions of type {kind} have no such field")
    return rope.number("rope_theta", fields.number("rope_theta", 10000.0)), _scaling(fields, rope, kind)


def _scaling(fields: ConfigFields, rope: ConfigFields, kind: str) -> Llama3Scaling | None:
    """Llama 3.1's scaling. As in transformers, a length outside the section precedes one inside."""
    if kind == "default":
        return None
    length = "original_max_position_embeddings"
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise rope.fault("high_freq_factor", high, f"expected a number above low_freq_factor, {low:g}")
    within = rope.count(length, fields.count("max_position_embeddings"))
    return Llama3Scaling(rope.number("factor"), low, high, fields.count(length, within))


def _labels(fields: ConfigFields) -> tuple[str, ...]:
    """The names of the labels in order. As in transformers, there are two unnamed labels if the file gives none."""
    names = fields.document.get("architectures")
    names = [] if names is None else names
    if not isinstance(names, list) or not all(str(name).endswith(HEADS) for name in names):
        raise fields.fault("architectures", names, f"expected names that end in {' or '.join(HEADS)}")
    if not any(str(name).endswith(LABEL_HEAD) for name in names):
        return ()
    labels = fields.document.get("id2label")
    if labels is None:
        count = fields.count("num_labels", 2)
        if count > MAX_LABELS:
            raise fields.fault("num_labels", count, f"expected at most {MAX_LABELS}")
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(labels, dict) or not labels or set(labels) != {str(i) for i in range(len(labels))}:
        raise fields.fault("id2label", labels, "expected a name for each label, from 0")
    return tuple(str(labels[str(i)]) for i in range(len(labels)))


def _quantisation(fields: ConfigFields | None) -> Quantisation | None:
    if fields is None:
        return None
    method = fields.document.get("quant_method")
    fields.refuse_unless("dynamic", ({},), "modules that are packed in ways of their own are not served")
    fields.refuse_unless("pack_dtype", ("int32",), "words of other types are not served")
    if method not in ("awq", "gptq"):
        raise fields.fault("quant_method", method, "expected awq or gptq")
    gptq = method == "gptq"
    bits = fields.count("bits", 4)
    if bits not in ((3, 4) if gptq else (4,)):
        raise fields.fault("bits", bits, "expected 3 or 4" if gptq else "expected 4")
    group = fields.document.get("group_size", 128)
    if not isinstance(group, int) or isinstance(group, bool) or (group != -1 and not 1 <= group <= MAX_COUNT):
        raise fields.fault("group_size", group, "expected -1 or a number of weights")
    return Quantisation(
        method=method,
        bits=bits,
        group=group,
        symmetric=fields.flag("sym", True) if gptq else not fields.flag("zero_point", True),
        act_order=fields.flag("desc_act", False) if gptq else False,
        zero_offset=1 if _layout(fields, gptq) == "gptq" else 0,
    )


def _layout(fields: ConfigFields, gptq: bool) -> str:
    """The layout of the packed words. Older and newer files name the field differently."""
    names = ("checkpoint_format" if gptq else "version", "format")
    name = next((name for name in names if fields.document.get(name) is not None), names[0])
    layout = fields.document.get(name, "gptq" if gptq else "gemm")
    layouts = ("gptq", "gptq_v2") if gptq else ("gemm",)
    if str(layout).lower() not in layouts:
        raise fields.fault(name, layout, f"expected {' or '.join(layouts)}")
    if fields.document.get("is_marlin_format"):
        raise fields.fault("is_marlin_format", True, "expected false")
    return str(layout).lower()
