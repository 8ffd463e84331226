"""Model files from the config.json of a Hugging Face model.

Families that a model file describes are listed here with what reads their attention. A family that is not listed, and
attention of an unknown kind, is refused with its name and with the nearest that is described.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from latency_models.deployment.model_config import (
    FAMILY_DEFAULTS,
    ConfigFields,
    attention_sizes,
    read_config_fields,
    stated_formats,
)
from latency_models.deployment.models import Checkpoint, Model, load_model
from latency_models.io.config_io import checked
from latency_models.io.files import is_path
from workloads.errors import BadInput
from workloads.json_files import read_json_object

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s of dense decoders with grouped queries and SwiGLU."""


def read_config(path: Path) -> ConfigFields:
    """The fields of a config.json of one of FAMILIES."""
    return read_config_fields(path, FAMILIES)


def model_from_config(path: Path) -> Model:
    """The model file that a config.json stands for, with the formats that its `quantization_config` states."""
    fields = read_config(path)
    return _model(fields, _grouped(fields), {"kind": "dense", "intermediate_size": fields.count("intermediate_size")})


def any_model(name: str | Path, base: Path = Path()) -> Model:
    """The model of a name (`load_model`), a model file, a config.json of a known family, or its folder."""
    path = base / name
    if is_path(str(name)) and (path / "config.json").is_file():
        path /= "config.json"
    elif not str(name).endswith(".json"):
        return load_model(name, base)
    fields = _decoder(ConfigFields(read_json_object(path), path))
    family = fields.document.get("model_type")
    if family in FAMILIES:
        return model_from_config(path)
    _refuse_unknown_attention(fields)
    if family not in READERS:
        raise fields.fault("model_type", family, _unknown_family(family))
    defaults = {**FAMILY_DEFAULTS.get(str(family), {}), **_pattern(fields)}
    fields = ConfigFields({**defaults, **fields.document}, path, fields.under)
    return _model(fields, READERS[str(family)](fields), _ffn(fields))


def _decoder(fields: ConfigFields) -> ConfigFields:
    """The fields of the decoder: of a model that also reads images, those of its `text_config`."""
    decoder = fields.section("text_config")
    if decoder is None:
        return fields
    inherited = {
        name: fields.document[name]
        for name in ("quantization_config", "tie_word_embeddings")
        if fields.document.get(name) is not None
    }
    return ConfigFields({**inherited, **decoder.document}, fields.file, decoder.under)


def _model(fields: ConfigFields, attention: dict[str, Any], ffn: dict[str, Any]) -> Model:
    path = fields.file
    document = {
        "schema": "twin.model/1",
        "name": path.stem if path.stem != "config" else path.resolve().parent.name,
        "hidden_size": fields.count("hidden_size"),
        "layers": fields.count("num_hidden_layers"),
        "vocabulary": fields.count("vocab_size"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        **attention,
        "ffn": ffn,
        "mtp_depth": _first(fields, "num_nextn_predict_layers", "mtp_num_hidden_layers"),
        "source": path.name,
    }
    model = checked(Model, document, path)
    try:
        formats = stated_formats(fields, sparse=ffn["kind"] == "moe")
    except BadInput as error:
        return model.without_formats(error)  # shapes are enough where formats are stated otherwise
    return model.published_as(Checkpoint(weights=formats.linear, experts=formats.experts))


def _sizes(fields: ConfigFields, **names: str) -> dict[str, int]:
    """Counts by our names, from the fields that have theirs."""
    return {name: fields.count(field) for name, field in names.items()}


def _first(fields: ConfigFields, *names: str) -> int:
    return next((fields.count(name) for name in names if fields.document.get(name)), 0)


# -- attention -------------------------------------------------------------------------------------------------------

NORMED = (
    "qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
)  # fmt: skip
"""Families that norm queries and keys head by head."""


def _grouped(fields: ConfigFields) -> dict[str, Any]:
    """Attention with grouped queries; `layer_types` says which layers of gpt-oss have a window."""
    heads, kv_heads, head_dim = attention_sizes(fields)
    windowed = _layers_of(fields, "sliding_attention")
    family = fields.document["model_type"]
    attention = {
        "kind": "gqa",
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "qk_norm": family in NORMED or (family == "glm4_moe" and fields.flag("use_qk_norm", False)),
        "window": fields.count("sliding_window") if windowed else 0,
        "windowed_layers": windowed,
    }
    return {"attention": attention}


def _layers_of(fields: ConfigFields, kind: str) -> int:
    kinds = fields.document.get("layer_types")
    return kinds.count(kind) if isinstance(kinds, list) else 0


def _latent(fields: ConfigFields) -> dict[str, Any]:
    """Latent attention; with `index_topk` it is sparse (DSA)."""
    shapes = _sizes(
        fields, heads="num_attention_heads", kv_compressed="kv_lora_rank", rope_dim="qk_rope_head_dim",
        nope_dim="qk_nope_head_dim", value_dim="v_head_dim",
    )  # fmt: skip
    attention: dict[str, Any] = {"kind": "mla", **shapes, "q_compressed": _first(fields, "q_lora_rank")}
    if fields.document.get("index_topk") is not None:
        sizes = _sizes(fields, heads="index_n_heads", head_dim="index_head_dim", top_k="index_topk")
        kinds = fields.document.get("indexer_types")
        attention["indexer"] = {**sizes, "layers": kinds.count("full") if isinstance(kinds, list) else None}
    return {"attention": attention}


def _gated_delta(fields: ConfigFields) -> dict[str, Any]:
    """Layers of Gated DeltaNet among layers of grouped queries with an output gate (Qwen3-Next)."""
    shapes = _sizes(
        fields, key_heads="linear_num_key_heads", value_heads="linear_num_value_heads",
        key_dim="linear_key_head_dim", value_dim="linear_value_head_dim", convolution="linear_conv_kernel_dim",
    )  # fmt: skip
    layers = _layers_of(fields, "linear_attention")
    if "layer_types" not in fields.document:
        layers = fields.count("num_hidden_layers")
        layers -= layers // fields.count("full_attention_interval", 4)
    attention = _grouped(fields)["attention"] | {"output_gate": fields.flag("attn_output_gate", True)}
    return {"attention": attention, "linear_attention": {"kind": "gdn", "layers": layers, **shapes}}


def _kimi_delta(fields: ConfigFields) -> dict[str, Any]:
    """Layers of Kimi Delta Attention among layers of latent attention (Kimi Linear)."""
    section = fields.section("linear_attn_config")
    if section is None:
        raise fields.fault("linear_attn_config", None, "expected the section that says which layers are linear")
    layers, heads, size = section.document.get("kda_layers"), section.count("num_heads"), section.count("head_dim")
    if not isinstance(layers, list) or not layers:
        raise section.fault("kda_layers", layers, "expected a list of layers")
    shapes = {"key_heads": heads, "value_heads": heads, "key_dim": size, "value_dim": size, "gate_rank": size}
    convolution = section.count("short_conv_kernel_size", 4)
    linear = {"kind": "kda", "layers": len(layers), **shapes, "convolution": convolution}
    return {**_latent(fields), "linear_attention": linear}


def _mamba(fields: ConfigFields) -> dict[str, Any]:
    """Layers that are Mamba-2, attention or an FFN each, by the letters of their pattern (Nemotron-H)."""
    pattern = fields.document.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != fields.count("num_hidden_layers") or set(pattern) - set("M*E-"):
        expected = "expected a letter for each layer: M (Mamba-2), * (attention), E (experts) or - (dense FFN)"
        raise fields.fault("hybrid_override_pattern", pattern, expected)
    if "E" in pattern and "-" in pattern:
        expected = "expected FFNs of one kind: dense layers among mixtures of experts are not described"
        raise fields.fault("hybrid_override_pattern", pattern, expected)
    shapes = _sizes(
        fields, key_heads="n_groups", value_heads="mamba_num_heads", key_dim="ssm_state_size",
        value_dim="mamba_head_dim", convolution="conv_kernel",
    )  # fmt: skip
    linear = {"kind": "mamba2", "layers": pattern.count("M"), **shapes}
    attention = _grouped(fields)["attention"]
    if fields.document.get("attention_head_dim"):
        attention["head_dim"] = fields.count("attention_head_dim")
    ffns = pattern.count("E") + pattern.count("-")
    return {"attention": attention, "linear_attention": linear, "ffn_layers": ffns}


LETTERS = {"mamba": "M", "attention": "*", "moe": "E", "mlp": "-"}
"""Letters of a pattern by the names of kinds of layers in `layers_block_type`."""


def _pattern(fields: ConfigFields) -> dict[str, Any]:
    """The pattern, and the number of layers, of a file that lists the kinds of its layers instead."""
    kinds = fields.document.get("layers_block_type")
    if not isinstance(kinds, list):
        return {}
    letters = "".join(LETTERS.get(str(kind), "?") for kind in kinds)
    return {"hybrid_override_pattern": letters, "num_hidden_layers": len(kinds)}


FAMILIES_OF: Mapping[Callable[[ConfigFields], dict[str, Any]], tuple[str, ...]] = {
    _grouped: (
        "mixtral", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "gpt_oss", "minimax_m2", "glm4_moe",
    ),
    _latent: ("deepseek_v2", "deepseek_v3", "kimi_k2", "deepseek_v32", "glm_moe_dsa"),
    _gated_delta: ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    _kimi_delta: ("kimi_linear",),
    _mamba: ("nemotron_h",),
}  # fmt: skip
READERS = {family: read for read, families in FAMILIES_OF.items() for family in families}
"""`model_type`s that a model file describes beside FAMILIES, and what reads their attention. The live engine serves
only some of them."""

UNKNOWN_FIELDS = {
    "compress_ratios": ("compressed attention (CSA, HCA)", "sparse attention with an indexer (deepseek_v32)"),
    "sparse_attention_config": ("block-sparse attention (MSA)", "sparse attention with an indexer (deepseek_v32)"),
    "hybrid_layer_pattern": ("windows with heads of their own", "attention windows (gpt_oss)"),
    "attention_chunk_size": ("attention in chunks", "attention windows (gpt_oss)"),
    "global_head_dim": ("windows with heads of their own", "attention windows (gpt_oss)"),
    "mla_use_output_gate": ("latent attention with an output gate", "latent attention (kimi_linear)"),
    "attn_res_block_size": ("attention over earlier layers", "latent attention (kimi_linear)"),
}
"""Fields that stand for attention that no model file describes, its name, and the nearest that is described."""

KINDS = ("full_attention", "sliding_attention", "linear_attention", "deepseek_sparse_attention")
"""Kinds of layers in `layer_types`."""


def _unknown_family(family: object) -> str:
    names = (*FAMILIES, *READERS)
    close = difflib.get_close_matches(str(family), names, n=1)
    hint = f" (the nearest is {close[0]})" if close else ""
    return f"expected one of {', '.join(names)}{hint}"


def _refuse_unknown_attention(fields: ConfigFields) -> None:
    for name, (attention, nearest) in UNKNOWN_FIELDS.items():
        if (value := fields.document.get(name)) not in (None, False):
            raise fields.fault(
                name, value, f"expected none: no model file describes {attention}; the nearest is {nearest}"
            )
    kinds = fields.document.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in KINDS:
            nearest = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.0)[0]
            raise fields.fault("layer_types", kind, f"expected {', '.join(KINDS)}; the nearest is {nearest}")


# -- FFNs ------------------------------------------------------------------------------------------------------------


def _ffn(fields: ConfigFields) -> dict[str, Any]:
    """The FFN of a layer; `mlp_hidden_act` relu2 has two matrices."""
    config = fields.document
    gated = config.get("mlp_hidden_act", "silu") != "relu2"
    experts = next((name for name in EXPERTS if config.get(name)), None)
    if experts is None or "-" in str(config.get("hybrid_override_pattern")):
        return {"kind": "dense", **_sizes(fields, intermediate_size="intermediate_size"), "gated": gated}
    size = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    for name, value in (("mlp_only_layers", []), ("decoder_sparse_step", 1), ("moe_layer_freq", 1)):
        fields.refuse_unless(name, (value,), "dense layers among mixtures of experts are not described")
    dense = _first(fields, "first_k_dense_replace")
    chosen = "num_experts_per_token" if config.get("num_experts_per_token") else "num_experts_per_tok"
    return {
        "kind": "moe",
        "intermediate_size": fields.count(size),
        "experts": fields.count(experts),
        "experts_per_token": fields.count(chosen),
        "shared_experts": _shared_experts(fields, fields.count(size)),
        "router_bias": config["model_type"] in BIASED_ROUTERS,
        "dense_layers": dense,
        "dense_intermediate_size": fields.count("intermediate_size") if dense else 0,
        "gated": gated,
        "latent_size": _first(fields, "moe_latent_size", "routed_expert_hidden_size"),
    }


EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
"""The families' names of the number of experts."""

SHARED_SIZES = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")

BIASED_ROUTERS = (
    "deepseek_v3", "minimax_m2", "kimi_k2", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "kimi_linear", "nemotron_h",
)  # fmt: skip
"""Families whose router has a bias for each expert."""


def _shared_experts(fields: ConfigFields, size: int) -> int:
    """Shared experts, each as large as a routed one: stated as a number, or as the size of all together."""
    for name in SHARED_SIZES:
        if fields.document.get(name):
            together = fields.count(name)
            if together % size:
                raise fields.fault(name, together, f"expected a multiple of the size of a routed expert ({size})")
            return together // size
    return _first(fields, "n_shared_experts", "num_shared_experts")
