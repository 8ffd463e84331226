"""Model files from the config.json of a Hugging Face model, and the formats that its `quantization_config` states.

A part of a layer that is excluded in most layers is in bf16: attention, experts, or a dense FFN. Step times know one
format of linear layers and one of experts, so that a mixture of experts may exclude either, and a dense model neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from latency_models.deployment.model_config import FAMILY_DEFAULTS, ConfigFields, attention_sizes, read_config_fields
from latency_models.deployment.models import Checkpoint, Formats, Model, Weights, load_model
from latency_models.io.builtin_files import is_path
from latency_models.io.config_io import checked
from workloads.errors import BadInput
from workloads.json_files import read_json_object

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s of dense decoders with grouped queries and SwiGLU."""

EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "minimax_m2", "deepseek_v3")
"""`model_type`s of mixtures of experts that a model file describes. The live engine serves only some of them."""


def read_config(path: Path) -> ConfigFields:
    """The fields of a config.json of one of FAMILIES."""
    return read_config_fields(path, FAMILIES)


def model_from_config(path: Path) -> Model:
    """The model file that a config.json stands for, with the formats that its `quantization_config` states."""
    fields = read_config(path)
    return _model(fields, _grouped_queries(fields), {"kind": "dense", **_sizes(fields, "intermediate_size")})


def any_model(name: str | Path, base: Path = Path()) -> Model:
    """The model of a name (`load_model`), a model file, a config.json of a known family, or its folder."""
    path = base / name
    if is_path(str(name)) and (path / "config.json").is_file():
        path /= "config.json"
    elif not str(name).endswith(".json"):
        return load_model(name, base)
    fields = ConfigFields(read_json_object(path), path)
    family = fields.document.get("model_type")
    if family not in EXPERT_FAMILIES:
        if family not in FAMILIES:
            raise fields.fault("model_type", family, f"expected one of {', '.join(FAMILIES + EXPERT_FAMILIES)}")
        return model_from_config(path)
    fields = ConfigFields({**FAMILY_DEFAULTS.get(family, {}), **fields.document}, path)
    attention = _latent(fields) if family == "deepseek_v3" else _grouped_queries(fields)
    return _model(fields, attention, _experts(fields))


def _model(fields: ConfigFields, attention: dict[str, Any], ffn: dict[str, Any]) -> Model:
    path = fields.file
    document = {
        "schema": "twin.model/1",
        "name": path.stem if path.stem != "config" else path.resolve().parent.name,
        "hidden_size": fields.count("hidden_size"),
        "layers": fields.count("num_hidden_layers"),
        "vocabulary": fields.count("vocab_size"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "attention": attention,
        "ffn": ffn,
        "source": path.name,
    }
    model = checked(Model, document, path)
    try:
        formats = stated_formats(fields, sparse=ffn["kind"] == "moe")
    except BadInput as error:
        return model.without_formats(error)  # shapes are enough where formats are stated otherwise
    return model.published_as(Checkpoint(weights=formats.linear, experts=formats.experts))


def _sizes(fields: ConfigFields, *names: str) -> dict[str, int]:
    return {name: fields.count(name) for name in names}


def _grouped_queries(fields: ConfigFields) -> dict[str, Any]:
    """Attention with grouped queries; `layer_types` says which layers of gpt-oss have a window."""
    heads, kv_heads, head_dim = attention_sizes(fields)
    kinds = fields.document.get("layer_types")
    windowed = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
    return {
        "kind": "gqa",
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "qk_norm": fields.document["model_type"] in ("qwen3", "qwen3_moe"),
        "window": fields.count("sliding_window") if windowed else 0,
        "windowed_layers": windowed,
    }


def _latent(fields: ConfigFields) -> dict[str, Any]:
    names = {
        "heads": "num_attention_heads",
        "kv_compressed": "kv_lora_rank",
        "rope_dim": "qk_rope_head_dim",
        "q_compressed": "q_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "value_dim": "v_head_dim",
    }
    return {"kind": "mla", **{name: fields.count(field) for name, field in names.items()}}


def _experts(fields: ConfigFields) -> dict[str, Any]:
    """The experts of a layer; the families name them differently, and some have dense layers before them."""
    config = fields.document
    experts = next((name for name in ("num_local_experts", "n_routed_experts") if config.get(name)), "num_experts")
    size = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    fields.refuse_unless("mlp_only_layers", ([],), "dense layers among mixtures of experts are not described")
    fields.refuse_unless("decoder_sparse_step", (1,), "dense layers among mixtures of experts are not described")
    shared, dense = (config.get(name) or 0 for name in ("n_shared_experts", "first_k_dense_replace"))
    return {
        "kind": "moe",
        "intermediate_size": fields.count(size),
        "experts": fields.count(experts),
        "experts_per_token": fields.count("num_experts_per_tok"),
        "shared_experts": shared,
        "router_bias": config["model_type"] in ("deepseek_v3", "minimax_m2"),
        "dense_layers": dense,
        "dense_intermediate_size": fields.count("intermediate_size") if dense else 0,
    }


METHODS: Mapping[str, Weights] = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
"""Formats by `quant_method`; those of ModelOpt and compressed-tensors are in further fields."""

MODELOPT: Mapping[str, Weights] = {"FP8": "fp8", "NVFP4": "fp4"}
"""Formats by ModelOpt's `quant_algo`."""

COMPRESSED: Mapping[str, Weights] = {
    "8-bit float": "fp8",
    "8-bit int": "int8",
    "4-bit float in groups of 16": "fp4",
    "4-bit float in groups of 32": "mxfp4",
}
"""Formats of compressed-tensors by `num_bits`, `type` and, of 4 bits, `group_size`."""

ATTENTION = ("self_attn.o_proj", "self_attn.q_proj", "self_attn.q_b_proj", "self_attn.q_a_proj")
EXPERTS = ("mlp.experts.0.down_proj", "block_sparse_moe.experts.0.w2")
DENSE_FFN = ("mlp.down_proj",)
"""Modules that stand for a part of a layer; families name them differently."""


def stated_formats(fields: ConfigFields, *, sparse: bool) -> Formats:
    """The formats of a model's weights; bf16 where nothing is quantised.

    Args:
        sparse: a mixture of experts.
    """
    section = _section(fields)
    if section is None:
        return Formats("bf16", "bf16")
    weights = _weights(section)
    patterns = _exclusions(section)
    layers = fields.count("num_hidden_layers")
    attention, experts, dense = (_excluded(part, patterns, layers) for part in (ATTENTION, EXPERTS, DENSE_FFN))
    if not sparse:
        if attention != dense or weights == "mxfp4":
            expected = "expected linear layers of one format, other than MXFP4, which is known of experts alone"
            raise section.fault("quant_method", section.document.get("quant_method"), expected)
        linear: Weights = "bf16" if attention else weights
        return Formats(linear, linear)
    return Formats("bf16" if attention or weights == "mxfp4" else weights, "bf16" if experts else weights)


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


def _exclusions(section: ConfigFields) -> list[str]:
    """Modules that are left in bf16; tools call the list differently."""
    lists = (section.document.get(name) or [] for name in ("ignore", "modules_to_not_convert", "exclude_modules"))
    return [text for names in lists if isinstance(names, list) for text in names if isinstance(text, str)]


def _excluded(modules: Sequence[str], patterns: Sequence[str], layers: int) -> bool:
    """True if one of the modules is excluded in most layers."""
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
