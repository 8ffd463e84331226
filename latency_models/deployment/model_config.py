"""Reads a Hugging Face config.json, for the live engine and for model files.

Each field is in one of three tables. READ fields are used. IGNORED fields change no answer. REFUSED_UNLESS fields
change the answer, and are accepted only with the values under which they do not. A field in none of them is ignored, as
transformers ignores it: the code that `model_type` names does not ask for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from workloads.errors import BadInput
from workloads.json_files import read_json_object

READ = frozenset(
    {
        "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
        "tie_word_embeddings",
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings",
        "sliding_window", "use_sliding_window", "layer_types", "auto_map",
        "quantization_config", "eos_token_id", "id2label", "num_labels",
    }
)  # fmt: skip

IGNORED = frozenset(
    {
        "initializer_range", "attention_dropout", "router_aux_loss_coef",
        "use_cache", "output_router_logits", "output_hidden_states", "output_attentions", "return_dict",
        "chunk_size_feed_forward",
        "pretraining_tp", "dtype", "torch_dtype", "transformers_version", "_name_or_path",
        "bos_token_id", "pad_token_id", "label2id", "max_window_layers",
    }
)  # fmt: skip
"""Fields that change no answer: settings of training, of the outputs and algorithms of transformers, types (flags
choose them), settings of tokenizers and templates, and `max_window_layers`, which needs `use_sliding_window`."""

_NO_SCALE = ((1.0,), "scaled logits, embeddings and residuals are not served")
_NO_CAP = ((), "neither capped logits nor another attention scale is served")
_NO_BIAS = ((False,), "linear layers with a bias are not served")
_NO_SHARED = ((0,), "experts that see every token are not served")

REFUSED_UNLESS: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "hidden_act": (("silu", "swish"), "other activations are not served"),
        "attention_bias": _NO_BIAS,
        "mlp_bias": _NO_BIAS,
        "qkv_bias": _NO_BIAS,
        "use_bias": _NO_BIAS,
        "is_causal": ((True,), "attention in both directions is not served"),
        "is_encoder_decoder": ((False,), "encoders are not served"),
        "add_cross_attention": ((False,), "cross attention is not served"),
        "attention_chunk_size": ((), "attention in chunks is not served"),
        "partial_rotary_factor": ((1.0,), "heads that are rotated in part are not served"),
        "per_layer_config": (({},), "layers that differ are not served"),
        "pruned_heads": (({},), "layers that differ are not served"),
        "no_rope_layers": (([],), "layers that differ are not served"),
        "mlp_only_layers": (([],), "dense layers among mixtures of experts are not served"),
        "decoder_sparse_step": ((1,), "dense layers among mixtures of experts are not served"),
        "n_shared_experts": _NO_SHARED,
        "shared_expert_intermediate_size": _NO_SHARED,
        "routed_scaling_factor": _NO_SCALE,
        "logit_scale": _NO_SCALE,
        "logits_scaling": _NO_SCALE,
        "embedding_multiplier": _NO_SCALE,
        "residual_multiplier": _NO_SCALE,
        "attention_multiplier": _NO_CAP,
        "query_pre_attn_scalar": _NO_CAP,
        "attn_logit_softcapping": _NO_CAP,
        "final_logit_softcapping": _NO_CAP,
        "clip_qkv": _NO_CAP,
        "problem_type": (("single_label_classification",), "labels are answered with a softmax"),
        "compression_config": ((), "quantization_config alone is read"),
    }
)
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
