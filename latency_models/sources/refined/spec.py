"""The scenario section of `source: refined`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from latency_models.io.paths import FilePath
from latency_models.sources.specification import SourceSpec, register
from latency_models.step_time import StepTime
from workloads.errors import BadInput


@register
class RefinedSpec(SourceSpec):
    """Step times that a short run of the engine has corrected: `path` is the file of `twin calibrate refine`."""

    source: Literal["refined"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        from latency_models.io.config_io import checked
        from latency_models.sources.refined.file_format import read_refined_file
        from latency_models.sources.refined.step_time import RefinedStepTime
        from latency_models.sources.registry import find_source

        path = base / self.path
        file = read_refined_file(path)
        name = str(file.step_time.get("source"))
        if name == self.source:
            raise BadInput("expected the section of another source", field="step_time.source", value=name, file=path)
        try:
            spec = find_source(name)
        except BadInput as error:
            raise BadInput(error.expected, field="step_time.source", value=name, file=path) from None
        section = checked(spec, file.step_time, path, "step_time")
        return RefinedStepTime.from_file(file, section.build(path.parent / file.folder), path)

    def provenance(self) -> dict[str, Any]:
        return {"source": self.source, "path": self.path}
