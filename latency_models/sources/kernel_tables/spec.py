"""The scenario section of `source: kernel_tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from latency_models.io.builtin_files import FilePath
from latency_models.sources.kernel_tables.settings import KernelTableSettings
from latency_models.sources.registry import SourceSpec, register
from latency_models.step_time import StepTime
from workloads.errors import BadInput


@register
class KernelTablesSpec(KernelTableSettings, SourceSpec):
    """Kernel microbenchmarks: `path` is a profiler's folder, or the file that `twin calibrate import` made of it."""

    source: Literal["kernel_tables"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        from latency_models.sources.kernel_tables.step_time import load_kernel_tables  # loads numpy

        settings = KernelTableSettings(**self.model_dump(exclude={"source", "path"}, exclude_unset=True))
        return load_kernel_tables(Path(self.path), settings, base=base)

    def check_ranks(self, data_parallel: int) -> None:
        """Both sides state the number of ranks that share experts."""
        if self.data_parallel != data_parallel:
            expected = f"expected engine.data_parallel_size ({data_parallel}): ranks that step together"
            raise BadInput(expected, field="step_time.data_parallel", value=self.data_parallel)
