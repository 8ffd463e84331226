"""The scenario section of `source: calibration_file`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from latency_models.io.paths import FilePath
from latency_models.sources.specification import SourceSpec, register
from latency_models.step_time import StepTime


@register
class CalibrationFileSpec(SourceSpec):
    """Kernel tables that `twin calibrate run` measured: the file at `path`."""

    source: Literal["calibration_file"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        from latency_models.sources.calibration_file.file_format import read_measured_calibration

        return read_measured_calibration(base / self.path).step_time()

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "path": self.path}
