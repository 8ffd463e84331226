"""Plays a workload on an engine in real time."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from live.engine import Engine
from live.generation import Generation
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
    """

    generations: list[Generation]
    sent: list[Generation]
    noticed: list[float]
    steps: list[TimedStep]
    followed: list[bool]

    @property
    def spans(self) -> list[tuple[Batch, float, float]]:
        """Every step as its batch, its begin, and its end or, where another followed at once, the begin of that."""
        ends = [step.end for step in self.steps]
        for i, followed in enumerate(self.followed[:-1]):
            if followed:
                ends[i] = self.steps[i + 1].begin
        return [(step.batch, step.begin, end) for step, end in zip(self.steps, ends, strict=True)]

    @property
    def late(self) -> list[float]:
        """Seconds by which requests reached the engine after their time."""
        return [now - each.request.arrival for now, each in zip(self.noticed, self.sent, strict=True)]

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """One entry a request: arrival, first_token, last_token (seconds) and output_tokens; and `gaps`, the seconds
        between successive tokens, of all of them together."""
        done = self.generations
        gaps = [np.diff(np.array(each.times)) for each in done if len(each.times) > 1]
        return {
            "arrival": np.array([each.request.arrival for each in done]),
            "first_token": np.array([each.first_token for each in done]),
            "last_token": np.array([each.last_token for each in done]),
            "output_tokens": np.array([float(len(each.output)) for each in done]),
            "gaps": np.concatenate(gaps) if gaps else np.empty(0),
        }


def play(engine: Engine, generations: Sequence[Generation]) -> Played:
    """Send each request at its arrival time, and step until all are answered.

    Like the twin's engine, this one notices arrivals between steps. `submitted` of each becomes its arrival time, from
    which waiting counts; all times are seconds since the start.

    Raises:
        ValueError: a request that would not fit if it were alone.
    """
    steps: list[TimedStep] = []
    noticed: list[float] = []
    followed: list[bool] = []
    waiting = sorted(generations, key=lambda generation: generation.request.arrival)
    engine.keep_times = True
    engine.watch = lambda batch, begin, end: steps.append(TimedStep(batch, begin, end))
    gc.collect()
    gc.disable()  # a pause of its own in the middle of a step
    start = time.perf_counter()
    engine.clock = lambda: time.perf_counter() - start
    try:
        sent = 0
        while True:
            now = engine.clock()
            while sent < len(waiting) and waiting[sent].request.arrival <= now:
                noticed.append(now)
                engine.submit(waiting[sent])
                waiting[sent].submitted = waiting[sent].request.arrival
                sent += 1
            if engine.step() is not None:
                followed.append(True)
            else:
                if followed:
                    followed[-1] = False
                if sent == len(waiting):
                    break
                _wait(engine, waiting[sent].request.arrival)
    finally:
        gc.enable()
        engine.watch = None
    return Played(list(generations), waiting, noticed, steps, followed)


def _wait(engine: Engine, until: float) -> None:
    while (left := until - engine.clock()) > 0:
        if left > NEARLY:
            time.sleep(left - NEARLY)
