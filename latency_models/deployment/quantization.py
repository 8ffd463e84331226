"""Formats of weights that the `quantization_config` of a config.json states, and bytes of LoRA adapters.

A part of a layer that is excluded in most layers is in bf16: attention, experts, or a dense FFN. Step times know one
format of linear layers and one of experts, so that a mixture of experts may exclude either, and a dense model neither.
LoRA (arXiv:2106.09685) is W' = W + (alpha / r) B A, with A of (r, inputs) and B of (outputs, r).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from latency_models.deployment.model_config import ConfigFields
from latency_models.deployment.models import OF_EXPERTS, Formats, Weights
from workloads.json_files import read_json_object

if TYPE_CHECKING:
    from latency_models.deployment.models import Model

METHODS: Mapping[str, Weights] = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
"""Formats by `quant_method`; those of ModelOpt and compressed-tensors are in further fields."""

MODELOPT: Mapping[str, Weights] = {"FP8": "fp8", "NVFP4": "fp4"}
"""Formats by ModelOpt's `quant_algo`."""

COMPRESSED: Mapping[str, Weights] = {
    "8-bit float": "fp8",
    "8-bit int": "int8",
    "4-bit float in groups of 16": "fp4",
    "4-bit float in groups of 32": "mxfp4",
    "4-bit int in groups of 32": "int4",
}
"""Formats of compressed-tensors by `num_bits`, `type` and, of 4 bits, `group_size`."""

ATTENTION = (
    "self_attn.o_proj", "self_attn.q_proj", "self_attn.q_b_proj", "self_attn.q_a_proj", "linear_attn.out_proj",
    "mixer.out_proj",
)  # fmt: skip
EXPERTS = ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2", "mixer.experts.0.down_proj")
DENSE_FFN = ("mlp.down_proj",)
"""Modules that stand for a part of a layer; families name them differently."""


def stated_formats(fields: ConfigFields, *, sparse: bool) -> Formats:
    """The formats of a model's weights, `sparse` for a mixture of experts; bf16 where nothing is quantised."""
    section = _section(fields)
    if section is None:
        return Formats("bf16", "bf16")
    weights = _weights(section)
    patterns = _exclusions(section)
    layers = fields.count("num_hidden_layers")
    attention, experts, dense = (_excluded(part, patterns, layers) for part in (ATTENTION, EXPERTS, DENSE_FFN))
    if not sparse:
        if attention != dense or weights in OF_EXPERTS:
            expected = (
                "expected linear layers of one format, other than MXFP4 and INT4, which are known of experts alone"
            )
            raise section.fault("quant_method", section.document.get("quant_method"), expected)
        linear: Weights = "bf16" if attention else weights
        return Formats(linear, linear)
    return Formats("bf16" if attention or weights in OF_EXPERTS else weights, "bf16" if experts else weights)


def _section(fields: ConfigFields) -> ConfigFields | None:
    """The section, or the content of ModelOpt's own file beside the config.json."""
    section = fields.section("quantization_config")
    path = fields.file.with_name("hf_quant_config.json")
    if section is None and path.is_file():
        inner = ConfigFields(read_json_object(path), path).section("quantization")
        return (
            None if inner is None else ConfigFields({"quant_method": "modelopt", **inner.document}, path, inner.under)
        )
    return section


def _weights(section: ConfigFields) -> Weights:
    algorithm = section.document.get("quant_algo")
    method = section.document.get("quant_method") or ("modelopt" if algorithm else None)
    if method == "compressed-tensors":
        return _compressed(section)
    if method in ("modelopt", "modelopt_fp4"):
        name, value, formats = "quant_algo", algorithm, MODELOPT
    else:
        name, value, formats = "quant_method", method, METHODS
    weights = formats.get(value) if isinstance(value, str) else None
    if weights is None:
        further = ", modelopt, compressed-tensors" if formats is METHODS else ""
        raise section.fault(name, value, f"expected one of {', '.join(formats)}{further}: others have no step times")
    return weights


def _compressed(section: ConfigFields) -> Weights:
    groups = section.section("config_groups")
    formats = set()
    for name, group in (groups.document if groups else {}).items():
        weights = group.get("weights") if isinstance(group, dict) else None
        stated: dict[str, Any] = weights if isinstance(weights, dict) else {}
        text = f"{stated.get('num_bits')}-bit {stated.get('type', 'int')}"
        text += f" in groups of {stated.get('group_size')}" if stated.get("num_bits") == 4 else ""
        if text not in COMPRESSED:
            expected = f"expected one of {', '.join(COMPRESSED)}: others have no step times"
            raise section.fault(f"config_groups.{name}.weights", text, expected)
        formats.add(COMPRESSED[text])
    if len(formats) != 1:
        raise section.fault("config_groups", sorted(formats), "expected weights of one format")
    return formats.pop()


PREFIXES = re.compile(r"^(re:)?(language_model\.model|model\.language_model|backbone)\.layers\.")
"""Names of a decoder's layers in models with images, and in Nemotron-H."""


def _exclusions(section: ConfigFields) -> list[str]:
    """Modules that are left in bf16; tools call the list differently."""
    lists = (section.document.get(name) or [] for name in ("ignore", "modules_to_not_convert", "exclude_modules"))
    texts = (text for names in lists if isinstance(names, list) for text in names if isinstance(text, str))
    return [PREFIXES.sub(r"\1model.layers.", text) for text in texts]


def _excluded(modules: Sequence[str], patterns: Sequence[str], layers: int) -> bool:
    expressions = [re.compile(text[3:]) for text in patterns if text.startswith("re:")]
    globs = [text for text in patterns if "*" in text and not text.startswith("re:")]
    plain = {text for text in patterns if "*" not in text}
    return any(
        2 * sum(_matches(f"model.layers.{i}.{module}", plain, globs, expressions) for i in range(layers)) > layers
        for module in modules
    )


def _matches(module: str, plain: set[str], globs: Sequence[str], expressions: Sequence[re.Pattern[str]]) -> bool:
    """True if a list names a module, one that it is within, or the end of either's name."""
    parts = module.split(".")
    ends = range(1, len(parts) + 1)
    return (
        any(".".join(parts[first:end]) in plain for end in ends for first in range(end))
        or any(fnmatchcase(module, text) or fnmatchcase(module, f"{text}.*") for text in globs)
        or any(expression.match(module) for expression in expressions)
    )


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
