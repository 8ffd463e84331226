"""Model files from the config.json of a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from latency_models.deployment.model_config import ConfigFields, attention_sizes, read_config_fields
from latency_models.deployment.models import Model
from latency_models.io.config_io import checked

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s of dense decoders with grouped queries and SwiGLU."""


def read_config(path: Path) -> ConfigFields:
    """The fields of a config.json of one of FAMILIES.

    Raises:
        BadInput: a file that cannot be read, another kind of model, or a field that makes the model another than the
            one that a model file describes.
    """
    return read_config_fields(path, FAMILIES)


def model_from_config(path: Path) -> Model:
    """The model file that a config.json stands for. It describes shapes alone: `quantization_config` is not read.

    Raises:
        BadInput: as `read_config`, or a field that is missing or wrong.
    """
    fields = read_config(path)
    heads, kv_heads, head_dim = attention_sizes(fields)
    document = {
        "schema": "twin.model/1",
        "name": path.stem if path.stem != "config" else path.resolve().parent.name,
        "hidden_size": fields.count("hidden_size"),
        "layers": fields.count("num_hidden_layers"),
        "vocabulary": fields.count("vocab_size"),
        "tied_embeddings": fields.flag("tie_word_embeddings", False),
        "attention": {
            "kind": "gqa",
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "qk_norm": fields.document["model_type"] == "qwen3",
        },
        "ffn": {"kind": "dense", "intermediate_size": fields.count("intermediate_size")},
        "source": path.name,
    }
    return checked(Model, document, path)
