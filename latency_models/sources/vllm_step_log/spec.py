"""The scenario section of `source: vllm_step_log`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from latency_models.io.paths import FilePath
from latency_models.origin import same_model
from latency_models.sources.specification import SourceSpec, register
from latency_models.step_time import StepTime
from workloads.errors import BadInput


@register
class VllmStepLogSpec(SourceSpec):
    """A regression on the logged steps at `path`, fitted to the first `share` of each experiment.

    `model`, if stated, is the one that the log must be of. The fitted model has a covariance, from which `draw` takes
    other parameters.
    """

    source: Literal["vllm_step_log"]
    path: FilePath
    share: float = Field(default=0.5, gt=0, le=1)
    model: str | None = None

    def build(self, base: Path) -> StepTime:
        from latency_models.sources.vllm_step_log.step_log import read_step_log  # loads numpy
        from latency_models.sources.vllm_step_log.step_time import StepRegression

        log = read_step_log(base / self.path)
        if self.model is not None and not same_model(self.model, log.origin.model):
            expected = f"expected {log.origin.model}, whose steps were logged"
            raise BadInput(expected, field="step_time.model", value=self.model)
        training, _ = log.split(self.share)
        return StepRegression().fit(training)

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "path": self.path, "share": self.share}
