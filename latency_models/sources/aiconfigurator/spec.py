"""The scenario section of `source: aiconfigurator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from latency_models.io.config_io import read_yaml
from latency_models.io.paths import FilePath
from latency_models.sources.specification import SourceSpec, register
from latency_models.step_time import StepTime
from workloads.errors import BadInput


@register
class AiconfiguratorSpec(SourceSpec):
    """Kernels of one model from aiconfigurator's tables: `path` is the file that `twin calibrate import` made.

    Attributes:
        decode: factor on the kernels of decodes.
        prefill: factor on the time that prompts add.
        prompt_step: further seconds of a step with prompts.
        per_sequence: seconds of the host for each decode.
        attention, expert_layers, collectives: further factors on these kernels.
        step: further seconds of a step with decodes. `latency_models.sources.aiconfigurator.regression` fits all
            corrections to closed-loop measurements.
    """

    source: Literal["aiconfigurator"]
    path: FilePath
    decode: PositiveFloat = 1.0
    prefill: PositiveFloat = 1.0
    prompt_step: NonNegativeFloat = 0.0
    per_sequence: NonNegativeFloat = 0.0
    attention: PositiveFloat = 1.0
    collectives: PositiveFloat = 1.0
    expert_layers: PositiveFloat = 1.0
    step: NonNegativeFloat = 0.0

    def build(self, base: Path) -> StepTime:
        from latency_models.sources.aiconfigurator.kernels import ModelKernels
        from latency_models.sources.aiconfigurator.step_time import AiconfiguratorStepTime, Corrections

        path = base / self.path
        if path.is_dir():
            raise BadInput("expected the file that twin calibrate import makes of this folder", file=path)
        kernels = ModelKernels.from_document(read_yaml(path))
        stated = self.model_dump(exclude={"source", "path", "expert_layers"})
        return AiconfiguratorStepTime(kernels, Corrections(**stated, experts=self.expert_layers))

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "path": self.path}
