"""The simulation of one AFD bundle (AFD 3.1 and 5.1): x attention instances feed y FFN instances.

A microbatch goes round six states: attention, A→F transfer, wait, FFN, F→A transfer, wait. m microbatches are in
flight, so that one computes attention while another is in transfer or at the FFN. `twin.afd.stages` has the two ways
in which the attention instances advance. This module has the shared parts: requests, slots, the steps of a microbatch,
and the records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from simpy.events import Event

from latency_models.stages import PassLatency
from schedulers.bundle_slots import Advance, BundleSlots, FfnOrder, Microbatch, Refill, refill_fcfs
from twin.afd.stages import IndependentSteps, LockstepSteps
from twin.environment import Environment

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BundleConfig:
    """The shape of a bundle. `layers` passes make one decode step; `ffn_order` makes no difference in lockstep."""

    attention_instances: int
    ffn_instances: int
    batch_size: int
    latency: PassLatency
    microbatches: int = 2
    layers: int = 1
    refill: Refill = refill_fcfs
    advance: Advance = "lockstep"
    ffn_order: FfnOrder = "in_order"
    fast_forward: bool = True


@dataclass(frozen=True, slots=True)
class Supply:
    """The requests of a bundle, by id 0, 1, …, in order of arrival, in arrays of one length.

    `arrivals`: None: all there from the start, the closed loop. The run ends when `completions` have finished (None:
    all): with more requests, slots stay full to the end. A request in progress at a stationary start has its generated
    tokens counted into `prefill` and taken off `decode`.
    """

    prefill: IntArray
    decode: IntArray
    arrivals: FloatArray | None = None
    completions: int | None = None

    @classmethod
    def of(
        cls,
        prefill: Sequence[int],
        decode: Sequence[int],
        arrivals: Sequence[float] | None = None,
        completions: int | None = None,
    ) -> Supply:
        times = None if arrivals is None else np.array(arrivals, dtype=np.float64)
        return cls(np.array(prefill, dtype=np.int64), np.array(decode, dtype=np.int64), times, completions)


StepRow = tuple[int, float, float, float, float, int, int, int, int]


@dataclass(slots=True)
class BundleRecords:
    """The records of one run. `steps` has one row for each microbatch step, in order of their ends.

    Columns: microbatch, ready (set out), end, time waited for attention and for the FFN (links included, over all
    layers), largest and total token load, requests, attention instances at work. `seated[id]` is microbatch + m·step of
    admission (−1: never): one integer, since there may be millions. `full_until`: when a slot first stayed empty.
    """

    steps: list[StepRow] = field(default_factory=list)
    seated: list[int] = field(default_factory=list)
    full_until: float | None = None


MICROBATCH, READY, END, ATTENTION_WAIT, FFN_WAIT, LOAD_MAX, LOAD_TOTAL, REQUESTS, AT_WORK = range(9)
"""Columns of `BundleRecords.steps`."""


def step_table(records: BundleRecords) -> FloatArray:
    """The steps as an array, one row for each microbatch step in order of their ends, shape (steps, 9)."""
    return np.array(records.steps, dtype=np.float64)


class Bundle:
    """One bundle, its supply of requests, and the records of its run. Call `run` once."""

    def __init__(self, config: BundleConfig, supply: Supply) -> None:
        self.config = config
        self._prefill = supply.prefill.tolist()
        self._decode = supply.decode.tolist()
        self._arrivals: list[float] | None = None if supply.arrivals is None else supply.arrivals.tolist()
        self.env = Environment()
        self.slots = BundleSlots(config.attention_instances, config.microbatches, config.batch_size, config.refill)
        self.records = BundleRecords(seated=[-1] * len(self._prefill))
        self._steps = step_runner(self.env, config)
        self._calendars: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in range(config.microbatches)]
        self._arrived = 0
        self._unfinished = len(self._prefill) if supply.completions is None else supply.completions
        self._over = self.env.event()

    def run(self) -> BundleRecords:
        """Run until the supply's `completions` have finished."""
        if self._arrivals is None:
            self._submit(len(self._prefill))
        for index in range(self.config.microbatches):
            self.env.process(self._life(index))
        self.env.run(until=self._over)
        return self.records

    # The life of a microbatch

    def _life(self, index: int) -> Generator[Event, None, None]:
        env, begin_step = self.env, self._begin_step
        while True:
            microbatch = begin_step(index)
            if microbatch is None:
                if self._arrivals is None or self._arrived == len(self._arrivals):
                    return
                yield env.at(self._arrivals[self._arrived])
                continue
            ready = env.now
            attention_wait, ffn_wait = yield from self._steps.run(microbatch)
            self._end_step(microbatch, ready, attention_wait, ffn_wait)

    # What happens at the edges of a step

    def _begin_step(self, index: int) -> Microbatch | None:
        if self._arrivals is not None:
            self._let_in()
        microbatch = self.slots.begin_step(index)
        if microbatch is not None and microbatch.admitted:
            step, calendar, seated = microbatch.step, self._calendars[index], self.records.seated
            decode = self._decode
            seat = index + self.config.microbatches * step
            for request_id in microbatch.admitted:
                seated[request_id] = seat
                calendar[step + decode[request_id]].append(request_id)
        if self.records.full_until is None and self.slots.microbatches[index].vacant:
            self.records.full_until = self.env.now
        return microbatch

    def _end_step(self, microbatch: Microbatch, ready: float, attention_wait: float, ffn_wait: float) -> None:
        active = microbatch.active
        self.records.steps.append(
            (
                microbatch.index,
                ready,
                self.env.now,
                attention_wait,
                ffn_wait,
                max(microbatch.loads),
                sum(microbatch.loads),
                microbatch.requests,
                len(active) - active.count(0),
            )
        )
        finished = self._calendars[microbatch.index].pop(microbatch.step + 1, ())
        self.slots.end_step(microbatch, finished)
        self._unfinished -= len(finished)
        if self._unfinished <= 0 and not self._over.triggered:
            self._over.succeed()

    # Arrivals

    def _let_in(self) -> None:
        assert self._arrivals is not None
        arrived, arrivals, now = self._arrived, self._arrivals, self.env.now
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            arrived += 1
        self._submit(arrived)

    def _submit(self, until: int) -> None:
        ids = range(self._arrived, until)
        self.slots.submit(zip(ids, self._prefill[self._arrived : until], strict=True))
        self._arrived = until


def step_runner(env: Environment, config: BundleConfig) -> LockstepSteps | IndependentSteps:
    """The stages of the bundle, as its attention instances advance."""
    latency, ffn_instances, layers, fast = config.latency, config.ffn_instances, config.layers, config.fast_forward
    if config.advance == "lockstep":
        return LockstepSteps(env, latency, ffn_instances, layers, fast_forward=fast)
    x = config.attention_instances
    return IndependentSteps(env, x, latency, ffn_instances, layers, config.ffn_order, fast_forward=fast)
