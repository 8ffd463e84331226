"""Protocols of live backends: a model on a machine that can be profiled and can replay a workload.

`live.validation` implements them: `LiveBackend`, `PoolsBackend` and `FleetBackend` for engines, `LiveBundle` for
bundles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from latency_models.sources.engine_regression import Step
from reports.bundle_metrics import BundleTimes
from reports.records.run_directory import RunDirectory
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec
from schedulers.batches import Batch
from schedulers.replica_set import ScalingLog
from schedulers.speculation import AnswerDrafts, SpeculationStats
from workloads.errors import BadInput
from workloads.request import Request
from workloads.sessions import Session

Integers = NDArray[np.int64]

Requests: TypeAlias = Sequence[tuple[Request, int]] | Sequence[Session]
"""Requests, each paired with its number of output tokens, or sessions, whose rounds have not begun."""


class ProfiledRounds(Protocol):
    """Timed steps of several profiling rounds. Times are seconds since the start."""

    @property
    def rounds(self) -> Sequence[Sequence[tuple[float, Step]]]:
        """The steps of each round in order, each with the time at which it began."""

    @property
    def frontend(self) -> Mapping[str, float]:
        """The work between steps of several engines (fields of `system.frontend`), or a fleet's `start_up`; seconds."""


class ReplayedRun(Protocol):
    """A workload that was replayed. Times are seconds since the start."""

    @property
    def speculation(self) -> SpeculationStats | None:
        """Counters of drafts; None without speculative decoding."""

    @property
    def scaling(self) -> ScalingLog | None:
        """The engines over time; None for engines that stay."""

    @property
    def profiled(self) -> ProfiledRounds | None:
        """The steps that were profiled in turns with it; None if nothing was."""

    @property
    def spans(self) -> Sequence[tuple[Batch, float, float]]:
        """Every step: its batch, its begin and its end."""

    @property
    def token_times(self) -> Sequence[Sequence[float]]:
        """The times of each request's output tokens."""

    def columns(self) -> Mapping[str, NDArray[np.float64]]:
        """One entry a request: arrival, noticed (taken in), first_token, last_token, output_tokens; sessions': more."""


class Backend(Protocol):
    """A model on a machine."""

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        """Time the steps of requests of random lengths."""

    def measure_drafts(
        self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]
    ) -> Sequence[AnswerDrafts]:
        """Answer requests, and find the outcomes of drafts at every position of their answers. Nothing is timed."""

    def warm_up(self, scheduler: SchedulerPlan, requests: Requests) -> bool:
        """Do the work that only the first replay of these requests would do. False if there is none."""

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedRun:
        """Send each request to an empty engine at its arrival time, and turns of sessions after their answers."""

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""

    def close(self) -> None:
        """End the processes that it has started, if any."""


class AbsentBackend:
    """A backend whose device is not on this machine, for a validation measured on another: methods raise `reason`."""

    def __init__(self, reason: BadInput) -> None:
        self._reason = reason

    def close(self) -> None:
        """Do nothing: there are no processes."""

    def __getattr__(self, name: str) -> NoReturn:
        raise self._reason


def description(backend: Backend, run: RunDirectory) -> dict[str, Any]:
    """The description of the backend that a run was measured on; the first call records it in the run folder."""
    file = run.path / "backend.json"
    if not file.exists():
        run.write_json(file.name, backend.describe())
    recorded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return recorded


class BundleRun(Protocol):
    """A live run: the times of requests, steps and roles, and by rank the stretches of each role's work."""

    @property
    def times(self) -> BundleTimes: ...

    @property
    def work(self) -> Mapping[int, Sequence[float]]: ...


class BundleBackend(Protocol):
    """Bundles of one model on a machine."""

    @property
    def layers(self) -> int:
        """Layers of the model."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's row, on its way to the FFN and back."""

    def run_in_turns(self, instances: int, loads: Sequence[tuple[Integers, Integers, int]]) -> Sequence[BundleRun]:
        """Run bundles with `instances` attention instances each in turns of milliseconds, until the first is over."""

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""
