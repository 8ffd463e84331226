"""The scenario section of `source: vllm_step_log`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from latency_models.io.paths import FilePath
from latency_models.sources.specification import SourceSpec, register
from latency_models.step_time import StepTime


@register
class VllmStepLogSpec(SourceSpec):
    """A regression on the logged steps at `path`, fitted to the first `share` of each experiment.

    The fitted model has a covariance, from which `draw` takes other parameters.
    """

    source: Literal["vllm_step_log"]
    path: FilePath
    share: float = Field(default=0.5, gt=0, le=1)

    def build(self, base: Path) -> StepTime:
        """See `SourceSpec.build`."""
        from latency_models.sources.vllm_step_log.step_log import read_step_log  # loads numpy
        from latency_models.sources.vllm_step_log.step_time import StepRegression

        training, _ = read_step_log(base / self.path).split(self.share)
        return StepRegression().fit(training)

    def provenance(self) -> dict[str, Any]:
        """See `SourceSpec.provenance`."""
        return {"source": self.source, "path": self.path, "share": self.share}
