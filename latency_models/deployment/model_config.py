"""A model's config.json: its values, and how its weights are quantised.

It is read for the live engine and for model files. docs/reference/model-directories.md lists fields that are used, and
those that change no answer: settings of training, of the outputs and algorithms of transformers, types (flags choose
them), and settings of tokenizers and templates. REFUSED_UNLESS fields change the answer, and are accepted only with the
values under which they do not. Any other field is ignored, as transformers ignores it: the code that `model_type` names
does not ask for it.

`quantization_config` states formats of weights. A part of a layer that is excluded in most layers is in bf16:
attention, experts, or a dense FFN. Step times know one format of linear layers and one of experts, so that a mixture of
experts may exclude either, and a dense model neither. LoRA (arXiv:2106.09685) is W' = W + (alpha / r) B A, with A of
(r, inputs) and B of (outputs, r).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from latency_models.deployment.models import OF_EXPERTS, Formats, Weights
from workloads.errors import BadInput
from workloads.json_files import read_json_object

if TYPE_CHECKING:
    from latency_models.deployment.models import Model


_REFUSED: tuple[tuple[tuple[object, ...], str, tuple[str, ...]], ...] = (
    (("silu", "swish"), "other activations are not served", ("hidden_act",)),
    ((False,), "linear layers with a bias are not served", ("attention_bias", "mlp_bias", "qkv_bias", "use_bias")),
    ((True,), "attention in both directions is not served", ("is_causal",)),
    ((False,), "encoders are not served", ("is_encoder_decoder",)),
    ((False,), "cross attention is not served", ("add_cross_attention",)),
    ((), "attention in chunks is not served", ("attention_chunk_size",)),
    ((1.0,), "heads that are rotated in part are not served", ("partial_rotary_factor",)),
    (({},), "layers that differ are not served", ("per_layer_config", "pruned_heads")),
    (([],), "layers that differ are not served", ("no_rope_layers",)),
    (([],), "dense layers among mixtures of experts are not served", ("mlp_only_layers",)),
    ((1,), "dense layers among mixtures of experts are not served", ("decoder_sparse_step",)),
    ((0,), "experts that see every token are not served", ("n_shared_experts", "shared_expert_intermediate_size")),
    ((1.0,), "scaled logits, embeddings and residuals are not served", (
        "routed_scaling_factor", "logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier",
    )),
    ((), "neither capped logits nor another attention scale is served", (
        "attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
        "clip_qkv",
    )),
    (("single_label_classification",), "labels are answered with a softmax", ("problem_type",)),
    ((), "quantization_config alone is read", ("compression_config",)),
)  # fmt: skip

REFUSED_UNLESS = {name: (values, why) for values, why, names in _REFUSED for name in names}
"""The values of each field that change nothing (null is always one), and why others are refused. Some of these fields
are read only by other families or engines, but a file that has them is for such an engine."""

FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {"max_position_embeddings": 2048},
        "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False},
        "qwen3": {
            "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "use_sliding_window": False,
        },
        "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32768, "use_sliding_window": False},
    }
)  # fmt: skip
"""Defaults that transformers has for missing fields, for those that differ between families."""

MAX_COUNT = 2**31 - 1
MAX_NUMBER = 3.4e38
"""The largest number accepted, near the largest float32."""


class ConfigFields:
    """Fields of one JSON object, checked as they are read. A null counts as a missing field."""

    def __init__(self, document: Mapping[str, Any], file: Path, under: str = "") -> None:
        self.document = document
        self.file = file
        self.under = under

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to MAX_COUNT."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
            raise self.fault(name, value, f"expected a whole number from 1 to {MAX_COUNT}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0 that float32 can hold."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
            raise self.fault(name, value, f"expected a number above 0, of at most {MAX_NUMBER:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, value, "expected true or false")
        return value

    def section(self, name: str) -> ConfigFields | None:
        """A nested object; None if there is none."""
        value = self.document.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, value, "expected an object of fields")
        return ConfigFields(value, self.file, f"{self.under}{name}.")

    def refuse_unless(self, name: str, values: tuple[object, ...], why: str) -> None:
        """Refuse every value except null and `values`."""
        value = self.document.get(name)
        if value is None or any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in values):
            return
        raise self.fault(name, value, f"expected {json.dumps(values[0] if values else None)}: {why}")

    def fault(self, name: str, value: object, expected: str) -> BadInput:
        """The error to raise about a field."""
        return BadInput(expected, field=self.under + name, value=value, file=self.file)

    def _value(self, name: str, default: object) -> object:
        value = self.document.get(name)
        return default if value is None else value


def read_config_fields(file: Path, families: tuple[str, ...]) -> ConfigFields:
    """The fields of a config.json, with FAMILY_DEFAULTS for those that it leaves out."""
    fields = ConfigFields(read_json_object(file), file)
    family = fields.document.get("model_type")
    if family not in families:
        raise fields.fault("model_type", family, f"expected one of {', '.join(families)}")
    fields = ConfigFields({**FAMILY_DEFAULTS[family], **fields.document}, file)
    for name, (values, why) in REFUSED_UNLESS.items():
        fields.refuse_unless(name, values, why)
    _refuse_windows(fields)
    _refuse_own_code(fields)
    return fields


def attention_sizes(fields: ConfigFields) -> tuple[int, int, int]:
    """The numbers (heads, kv_heads, head_dim). A missing or null `head_dim` is the hidden size over the heads."""
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    kv_heads, head_dim = fields.count("num_key_value_heads", heads), fields.count("head_dim", max(hidden // heads, 1))
    if heads % kv_heads:
        raise fields.fault("num_key_value_heads", kv_heads, f"expected a divisor of {heads} heads")
    if head_dim % 2:
        raise fields.fault("head_dim", head_dim, "expected an even number: rotary positions turn pairs")
    return heads, kv_heads, head_dim


def end_tokens(fields: ConfigFields) -> tuple[int, ...]:
    """The ids in `eos_token_id`, one or a list, of a config.json or generation_config.json."""
    value = fields.document.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= MAX_COUNT for token in tokens):
        raise fields.fault("eos_token_id", value, "expected token ids")
    return tuple(tokens)


def _refuse_windows(fields: ConfigFields) -> None:
    """Refuse sliding windows. Qwen's files switch them by `use_sliding_window`; elsewhere a `sliding_window` is on."""
    why = "expected {}: attention windows are not served"
    if fields.flag("use_sliding_window", False):
        raise fields.fault("use_sliding_window", True, why.format("false"))
    window = fields.document.get("sliding_window")
    if window is not None and fields.document.get("use_sliding_window") is None:
        raise fields.fault("sliding_window", window, why.format("null"))
    kinds = fields.document.get("layer_types")
    layers = fields.count("num_hidden_layers")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise fields.fault("layer_types", kinds, f"expected a list of {layers}, one for each layer")
    for kind in kinds or ():
        if kind != "full_attention":
            raise fields.fault("layer_types", kind, why.format("full_attention in all layers"))


def _refuse_own_code(fields: ConfigFields) -> None:
    """Refuse code for a model, which may compute anything. Code for a tokenizer or a config is harmless."""
    section = fields.section("auto_map")
    for name, value in section.document.items() if section else ():
        if name.startswith("AutoModel"):
            raise fields.fault(f"auto_map.{name}", value, "expected none: code that comes with a model is not run")


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


def _exclusions(section: ConfigFields) -> list[re.Pattern[str]]:
    """Names of modules in bf16, as tools list them: of a module, or one that it is within, a glob, or an expression."""
    lists = (section.document.get(name) or [] for name in ("ignore", "modules_to_not_convert", "exclude_modules"))
    names = (text for texts in lists if isinstance(texts, list) for text in texts if isinstance(text, str))
    patterns = []
    for text in (PREFIXES.sub(r"\1model.layers.", name) for name in names):
        if text.startswith("re:"):
            patterns.append(text[3:])
        elif "*" in text:
            patterns += [translate(text), translate(f"{text}.*")]
        else:
            patterns.append(rf"(.*\.)?{re.escape(text)}(\.|$)")
    return [re.compile(pattern) for pattern in patterns]


def _excluded(modules: Sequence[str], patterns: Sequence[re.Pattern[str]], layers: int) -> bool:
    """True if the patterns match one of these modules in most layers."""
    names = ([f"model.layers.{i}.{module}" for i in range(layers)] for module in modules)
    return any(
        2 * sum(any(pattern.match(name) for pattern in patterns) for name in of_layers) > layers for of_layers in names
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
