"""A model file from the config.json that comes with a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latency_models.models import Model
from latency_models.strict import checked, read_text
from workloads.errors import BadInput

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s of dense decoders with grouped queries and SwiGLU."""


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json of one of FAMILIES.

    Raises:
        BadInput: a file that cannot be read, or of another kind of model.
    """
    try:
        config = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise BadInput(f"expected JSON: {error.msg}", file=path, line=error.lineno) from None
    if not isinstance(config, dict):
        raise BadInput("expected an object of fields", file=path)
    if config.get("model_type") not in FAMILIES:
        expected = f"expected one of {', '.join(FAMILIES)}"
        raise BadInput(expected, field="model_type", value=config.get("model_type"), file=path)
    return config


def model_from_config(path: Path) -> Model:
    """The model file that a config.json stands for.

    Raises:
        BadInput: a file that cannot be read, another kind of model, or a field that is missing or wrong.
    """
    config = read_config(path)

    def field(name: str) -> Any:
        if name not in config:
            raise BadInput("expected this field, which is missing", field=name, file=path)
        return config[name]

    heads, hidden = field("num_attention_heads"), field("hidden_size")
    document = {
        "schema": "twin.model/1",
        "name": path.stem if path.stem != "config" else path.resolve().parent.name,
        "hidden_size": hidden,
        "layers": field("num_hidden_layers"),
        "vocabulary": field("vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention": {
            "kind": "gqa",
            "heads": heads,
            "kv_heads": config.get("num_key_value_heads", heads),
            "head_dim": config.get("head_dim") or hidden // heads,
            "qk_norm": config["model_type"] == "qwen3",
        },
        "ffn": {"kind": "dense", "intermediate_size": field("intermediate_size")},
        "source": path.name,
    }
    return checked(Model, document, path)
