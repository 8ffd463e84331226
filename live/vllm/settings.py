"""Settings of the scheduler classes, section `serving_twin` of vLLM's `--additional-config`, and of its process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.sources.registry import StepTimeSpec
from scenarios.engine import OneShotSpec
from scenarios.steps import ChunkingSpec
from schedulers.step_policies import ChunkPolicy
from workloads.errors import BadInput

SECTION = "serving_twin"


class SchedulerSettings(Strict):
    """Abilities of a scheduler class beside vLLM's own scheduling; without any field there are none.

    `step_log`: file to append every step to, as the run `experiment` with a `workload`. `clock`: `wall`, or `direct`:
    CPU time, where the scheduler's process runs the model. `chunking`, `one_shot`: as in a scenario's engine;
    `step_time`: predicts for chunks. `base`: folder that paths of tables start from.
    """

    step_log: str | None = None
    experiment: str = ""
    workload: str = ""
    clock: Literal["wall", "direct"] = "wall"
    chunking: ChunkingSpec | None = None
    step_time: StepTimeSpec | None = None
    one_shot: OneShotSpec | None = None
    base: Path = Field(default=Path(), exclude=True)

    def chunk_policy(self) -> ChunkPolicy | None:
        """A new chunk policy, or None."""
        if self.chunking is None:
            return None
        return self.chunking.build(None if self.step_time is None else self.step_time.build(self.base))


def vllm_config_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The configuration among the arguments of a vLLM scheduler, by name or first."""
    return kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]


def read_settings(additional_config: Any) -> SchedulerSettings:
    """The settings in a vLLM configuration: fields, or the path of a YAML file; `BadInput` if unusable."""
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    if section is None:
        return SchedulerSettings()
    if isinstance(section, str):
        path = Path(section)
        settings = checked(SchedulerSettings, read_yaml(path), path)
        return settings.model_copy(update={"base": path.parent})
    if not isinstance(section, Mapping):
        expected = "expected fields, or the path of a YAML file"
        raise BadInput(expected, field=f"additional_config.{SECTION}", value=section)
    return checked(SchedulerSettings, dict(section), Path(f"additional_config.{SECTION}"))


VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread, bound to no core. Without the first two, on a machine that other
programs use, a step of 8 ms takes 470: threads wait for each other at every barrier."""


def prepare_process() -> None:
    """Set what the environment does not set already, for an engine in this process."""
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **VARIABLES}.items():
        os.environ.setdefault(name, value)


def end_with_parent() -> None:
    """Have the calling process get SIGTERM when its parent ends, be it killed; on Linux alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
