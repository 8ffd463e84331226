"""The model that a name stands for, and the format of its weights as the tables name it."""

from __future__ import annotations

from pathlib import Path

from latency_models.deployment.hugging_face import any_model
from latency_models.deployment.models import ExpertFFN, Model
from workloads.errors import BadInput
from workloads.json_files import read_json_object


def model_and_format(name: str) -> tuple[Model, str]:
    """A model and the format of its weights: as it is published, or as its name or `quantization_config` says.

    Mixtures of experts in FP8 are scaled block by block, as they are published.
    """
    model = any_model(name)
    formats = model.formats()
    if str(formats) not in ("bf16", "fp8"):
        expected = "expected weights in bf16 or fp8; --weights names another format as the tables do"
        raise BadInput(expected, field="--model", value=f"{name} ({formats})")
    if formats.linear == "bf16":
        return model, "float16"
    blocks = isinstance(model.ffn, ExpertFFN) or (name.endswith(".json") and _scaled_in_blocks(Path(name)))
    return model, "fp8_block" if blocks else "fp8"


def _scaled_in_blocks(path: Path) -> bool:
    section = read_json_object(path).get("quantization_config")
    return isinstance(section, dict) and bool(section.get("weight_block_size"))
