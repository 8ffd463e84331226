"""Replays a workload on an engine: every request at its arrival time, by the wall or by a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from live.clock import Clock, WallClock
from live.engine import Engine
from live.generation import Generation
from live.memory import no_garbage_collection
from live.validation.clients import OpenLoop, Sessions
from live.validation.profiling import EngineProfile, ProfilingResult
from live.validation.timed_engine import TimedEngine
from schedulers.batches import Batch
from schedulers.sequence import Sequence as Sequenced
from schedulers.speculation import SpeculationStats, SpeculativeEngineCore

TURN_STEPS = 32
"""Steps of a replay after which a profile goes on by as many. The machine's speed differs little within them, and the
first step after a turn of the other engine, which finds caches cold, is as rare for both."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A measured step: its batch, its begin and its end, seconds since the start."""

    batch: Batch
    begin: float
    end: float


@dataclass(frozen=True)
class ReplayResult:
    """A replayed workload, in seconds since the start; `noticed`: when the engine took in each of `by_arrival`.

    `followed`: of each step, whether the engine began the next one without waiting for an arrival.
    """

    generations: list[Generation]
    by_arrival: list[Generation]
    noticed: list[float]
    steps: list[TimedStep]
    followed: list[bool]
    more: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    speculation: SpeculationStats | None = None
    profiled: ProfilingResult | None = None
    scaling: ClassVar[None] = None

    @property
    def spans(self) -> list[tuple[Batch, float, float]]:
        """Every step: its batch, its begin, and its end or the begin of the next step where that follows at once."""
        return step_spans(self.steps, self.followed)

    @property
    def token_times(self) -> list[list[float]]:
        """The times of each request's output tokens, seconds since the start."""
        return [generation.times for generation in self.generations]

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """One entry a request: arrival, noticed, first_token, last_token (seconds since the start), output_tokens."""
        noticed = {generation.request.id: now for now, generation in zip(self.noticed, self.by_arrival, strict=True)}
        return request_columns(self.generations, [noticed[row.request.id] for row in self.generations]) | self.more


def step_spans(steps: Sequence[TimedStep], followed: Sequence[bool]) -> list[tuple[Batch, float, float]]:
    """`ReplayResult.spans` of one engine."""
    ends = [step.end for step in steps]
    for i, follows in enumerate(followed[:-1]):
        if follows:
            ends[i] = steps[i + 1].begin
    return [(step.batch, step.begin, end) for step, end in zip(steps, ends, strict=True)]


def request_columns(generations: Sequence[Generation], noticed: Sequence[float]) -> dict[str, npt.NDArray[np.float64]]:
    """Times of requests, seconds since the start, and their output tokens. `noticed`: when the engine took them in."""
    return {
        "arrival": np.array([generation.request.arrival for generation in generations]),
        "noticed": np.array(noticed),
        "first_token": np.array([generation.first_token for generation in generations]),
        "last_token": np.array([generation.last_token for generation in generations]),
        "output_tokens": np.array([float(len(generation.output)) for generation in generations]),
    }


def replay(
    engine: TimedEngine,
    requests: Sequence[Generation] | Sessions,
    clock: Clock | None = None,
    profile: EngineProfile | None = None,
) -> ReplayResult:
    """Send each request when it arrives, and step the engine until all are finished.

    Arrivals are noticed between steps, as in the simulated engine; `submitted` becomes the arrival. The clock stops
    while sessions make up a request. `profile`: of another engine, which goes on by turns of `TURN_STEPS` steps.
    """
    steps: list[TimedStep] = []
    noticed: list[float] = []
    followed: list[bool] = []
    clients = OpenLoop(requests) if isinstance(requests, Sequence) else requests
    by_arrival: list[Generation] = []
    cached: dict[int, Sequenced] = {}
    engine.keep_times = True
    engine.watch = lambda batch, begin, end: steps.append(TimedStep(batch, begin, end))
    with no_garbage_collection():
        engine.clock = clock = clock or WallClock()
        clock.start()
        while True:
            now = clock()
            if (arrival := clients.next_arrival) is not None and arrival <= now:
                with clock.paused():
                    due = clients.due(now)
                for generation in due:
                    noticed.append(now)
                    cached[generation.request.id] = engine.submit(generation)
                    generation.submitted = generation.request.arrival
                by_arrival += due
            result = engine.step()
            if result is not None:
                for generation in result.finished:
                    clients.finished(generation)
                followed.append(True)
                if profile is not None and not len(followed) % TURN_STEPS:
                    with clock.paused():
                        profile.go_on(TURN_STEPS)
            else:
                if followed:
                    followed[-1] = False
                if (arrival := clients.next_arrival) is None:
                    break
                clock.wait_until(arrival)
    engine.watch = None
    core = engine.core if isinstance(engine, Engine) else None
    stats = core.stats if isinstance(core, SpeculativeEngineCore) else None
    generations = list(requests) if isinstance(requests, Sequence) else by_arrival
    columns = clients.columns(generations)
    if columns:
        columns["cached_tokens"] = np.array([float(cached[row.request.id].num_cached_tokens) for row in generations])
    profiled = None if profile is None else profile.take()
    return ReplayResult(generations, by_arrival, noticed, steps, followed, columns, stats, profiled)
