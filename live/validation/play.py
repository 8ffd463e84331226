"""Plays a workload on an engine in real time."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from latency_models.yardsticks import Reading
from live.engine import Engine
from live.generation import Generation
from live.validation.pace import PacedClock
from schedulers.batches import Batch

NEARLY = 1e-3
"""Seconds before an arrival at which waiting turns to looking at the clock: sleeping wakes that late at times."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step that ran: its batch, and when it began and ended, seconds since the start."""

    batch: Batch
    begin: float
    end: float


@dataclass(frozen=True)
class Played:
    """What became of a workload: its requests, in the order given and in the order sent, and every step.

    Attributes:
        noticed: when the engine took in each of `sent`, seconds: after its time, where a step was running.
        followed: of each step, whether the engine went on to the next without waiting for an arrival.
        readings: of the machine's pace.
    """

    generations: list[Generation]
    sent: list[Generation]
    noticed: list[float]
    steps: list[TimedStep]
    followed: list[bool]
    readings: list[Reading]

    @property
    def spans(self) -> list[tuple[Batch, float, float]]:
        """Every step as its batch, its begin, and its end or, where another followed at once, the begin of that."""
        ends = [step.end for step in self.steps]
        for i, followed in enumerate(self.followed[:-1]):
            if followed:
                ends[i] = self.steps[i + 1].begin
        return [(step.batch, step.begin, end) for step, end in zip(self.steps, ends, strict=True)]

    @property
    def token_times(self) -> list[list[float]]:
        """When each token of each request came, seconds since the start."""
        return [each.times for each in self.generations]

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """One entry a request: arrival, noticed, first_token, last_token (seconds since the start), output_tokens."""
        done = self.generations
        noticed = {each.request.id: now for now, each in zip(self.noticed, self.sent, strict=True)}
        return {
            "arrival": np.array([each.request.arrival for each in done]),
            "noticed": np.array([noticed[each.request.id] for each in done]),
            "first_token": np.array([each.first_token for each in done]),
            "last_token": np.array([each.last_token for each in done]),
            "output_tokens": np.array([float(len(each.output)) for each in done]),
        }


def play(
    engine: Engine, generations: Sequence[Generation], make_clock: Callable[[], PacedClock] = PacedClock
) -> Played:
    """Send each request at its arrival time, and step until all are answered.

    Like the twin's engine, this one notices arrivals between steps. `submitted` of each becomes its arrival time, from
    which waiting counts; all times are seconds since the start, by a clock that stands still while the pace is read.

    Raises:
        ValueError: a request that would not fit if it were alone.
    """
    steps: list[TimedStep] = []
    noticed: list[float] = []
    followed: list[bool] = []
    waiting = sorted(generations, key=lambda generation: generation.request.arrival)
    engine.keep_times = True
    engine.watch = lambda batch, begin, end: steps.append(TimedStep(batch, begin, end))
    with collector_at_rest():
        engine.clock = clock = make_clock()
        sent = 0
        while True:
            now = clock()
            while sent < len(waiting) and waiting[sent].request.arrival <= now:
                noticed.append(now)
                engine.submit(waiting[sent])
                waiting[sent].submitted = waiting[sent].request.arrival
                sent += 1
            if engine.step() is not None:
                followed.append(True)
                clock.rest(steps[-1].batch.tokens)
            else:
                if followed:
                    followed[-1] = False
                if sent == len(waiting):
                    break
                _wait(clock, waiting[sent].request.arrival)
    engine.watch = None
    return Played(list(generations), waiting, noticed, steps, followed, clock.readings)


def _wait(clock: PacedClock, until: float) -> None:
    while (left := until - clock()) > 0:
        if left > NEARLY:
            time.sleep(left - NEARLY)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """No garbage collection, which would be a pause in the middle of a step."""
    was_at_work = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_at_work:
            gc.enable()
