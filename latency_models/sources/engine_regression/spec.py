"""The scenario section of `source: engine_regression`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from latency_models.io.paths import FilePath
from latency_models.sources.specification import SourceSpec, register
from latency_models.step_time import StepTime


@register
class EngineRegressionSpec(SourceSpec):
    """A regression on timed steps of the engine to be predicted: `path` is the file that `twin validate` writes."""

    source: Literal["engine_regression"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        from latency_models.sources.engine_regression.step_time import read_engine_regression  # loads numpy

        return read_engine_regression(base / self.path)

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "path": self.path}
