"""The model that a name stands for, and the format of its weights as the tables name it."""

from __future__ import annotations

from pathlib import Path

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import ExpertFFN, Model
from latency_models.io.builtin_files import builtin_names
from workloads.errors import BadInput
from workloads.json_files import read_json_object

FP8 = "-fp8"
"""Ending of a built-in name that stands for the checkpoint in FP8."""

SIXTEEN_BITS = "float16"


def model_and_format(name: str) -> tuple[Model, str]:
    """A model and the format of its weights.

    A built-in name is in 16 bits, one that ends in -fp8 in FP8, and a config.json in what its `quantization_config`
    says. Mixtures of experts in FP8 are scaled block by block, as they are published.

    Raises:
        BadInput: an unknown name, a file that cannot be read, or a quantisation that the tables do not name.
    """
    base = name.lower().removesuffix(FP8)
    if name.lower().endswith(FP8) and base in builtin_names("models"):
        model = any_model(base)
        return model, "fp8_block" if isinstance(model.ffn, ExpertFFN) else "fp8"
    return any_model(name), _stated_format(Path(name)) if name.endswith(".json") else SIXTEEN_BITS


def _stated_format(path: Path) -> str:
    section = read_json_object(path).get("quantization_config")
    if section is None:
        return SIXTEEN_BITS
    method = section.get("quant_method") if isinstance(section, dict) else section
    if method != "fp8":
        expected = "expected fp8 or none; --weights names another format as the tables do"
        raise BadInput(expected, field="quantization_config.quant_method", value=method, file=path)
    return "fp8_block" if section.get("weight_block_size") else "fp8"
