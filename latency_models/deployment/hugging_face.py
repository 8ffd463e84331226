"""Model files from the config.json of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latency_models.deployment.model_config import FAMILY_DEFAULTS, ConfigFields, attention_sizes, read_config_fields
from latency_models.deployment.models import Checkpoint, Model, load_model
from latency_models.deployment.quantization import stated_formats
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
    known = fields.document
    experts = next((name for name in ("num_local_experts", "n_routed_experts") if known.get(name)), "num_experts")
    size = "moe_intermediate_size" if known.get("moe_intermediate_size") else "intermediate_size"
    fields.refuse_unless("mlp_only_layers", ([],), "dense layers among mixtures of experts are not described")
    fields.refuse_unless("decoder_sparse_step", (1,), "dense layers among mixtures of experts are not described")
    shared, dense = (known.get(name) or 0 for name in ("n_shared_experts", "first_k_dense_replace"))
    return {
        "kind": "moe",
        "intermediate_size": fields.count(size),
        "experts": fields.count(experts),
        "experts_per_token": fields.count("num_experts_per_tok"),
        "shared_experts": shared,
        "router_bias": known["model_type"] in ("deepseek_v3", "minimax_m2"),
        "dense_layers": dense,
        "dense_intermediate_size": fields.count("intermediate_size") if dense else 0,
    }
