"""Measurements of a live backend: profiled steps, and replayed workloads. Times are seconds since the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from latency_models.fitting.estimator import Floats
from latency_models.sources.engine_regression import Step
from schedulers.batches import Batch
from schedulers.replica_set import ScalingLog
from schedulers.speculation import SpeculationStats

Span: TypeAlias = tuple[Batch, float, float]
"""A step: its batch, its begin and its end."""


@dataclass(frozen=True)
class ProfiledRounds:
    """Timed steps of several rounds of random requests, each step with its begin.

    `frontend`: the work between steps of several engines (fields of `system.frontend`), or a fleet's `start_up`.
    """

    rounds: Sequence[Sequence[tuple[float, Step]]]
    frontend: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplayedRun:
    """A workload that was replayed.

    Attributes:
        requests: columns: arrival, noticed (taken in), first_token, last_token, output_tokens; sessions have more.
        token_times: the times of each request's output tokens.
        spans: every step; one ends where the next begins, if that follows at once.
        profiled: the steps that were profiled in turns with it. speculation: counters of drafts.
        scaling: the engines over time, if they change.
    """

    requests: Mapping[str, Floats]
    token_times: Sequence[Sequence[float]]
    spans: Sequence[Span]
    profiled: ProfiledRounds | None = None
    speculation: SpeculationStats | None = None
    scaling: ScalingLog | None = None
