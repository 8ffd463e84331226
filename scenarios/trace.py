"""Traces of both kinds of workload: `workload.trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from latency_models.io.config_io import Strict
from latency_models.io.paths import FilePath
from scenarios.registered import registered
from workloads.errors import BadInput
from workloads.traces import AUTO, TRACE_FORMATS, Trace, read_trace


class TraceSpec(Strict):
    """A recorded workload. `pairing` joint keeps each prompt with its answer, independent shuffles them."""

    path: FilePath | None = None
    format: Annotated[str, registered(TRACE_FORMATS, AUTO)] = AUTO
    pairing: Literal["joint", "independent"] = "joint"

    def read(self, base: Path) -> Trace:
        """The trace. Relative paths start from `base`.

        Raises:
            BadInput: no file is named, or it cannot be read in its format.
        """
        if self.path is None:
            raise BadInput("expected a trace file: give --trace FILE", field="workload.trace.path")
        return read_trace(base / self.path, self.format)
