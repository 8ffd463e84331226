"""The simulation of one AFD bundle (AFD 3.1 and 5.1): x attention instances feed y FFN instances.

A microbatch goes round six states: attention, A→F transfer, wait, FFN, F→A transfer, wait. m microbatches are in
flight, so that one computes attention while another is in transfer or at the FFN.

In lockstep all attention instances compute the same microbatch, and its attention ends with the slowest of them.
Attention, the two directions of the link, and the FFN each serve one microbatch at a time, in order of arrival.

Where they are `independent`, every attention instance is a server with a link of its own to the FFN, and goes on to its
next microbatch on its own. It takes the microbatches in the order in which they come back, and sends its part as soon
as that is computed. The FFN begins when the parts of all instances that have requests in the microbatch are there, and
returns the result to all of them at once. It serves the microbatches in the order in which they set out (`in_order`),
as one that receives from named sources does. A `first_ready` FFN takes whichever microbatch is complete. That makes a
difference only where some instances have no requests in a microbatch.

All stages serve in order, and every microbatch visits them in the same order, so none overtakes another, except at a
`first_ready` FFN. When a microbatch sets out, all its waiting times are therefore known. With `fast_forward` one event
a pass carries it round; without it, and with `first_ready`, each state is an event of its own. Both give the same
records to the last bit (`tests/parity`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import Event

from latency_models.stages import PassLatency
from schedulers.bundle_slots import Advance, BundleSlots, FfnOrder, Microbatch, Refill, refill_fcfs
from twin.environment import Environment

Waits = tuple[float, float]
"""Time that a microbatch step waited for attention and for the FFN, links included, over all layers."""


class Stage:
    """A server of one microbatch at a time, in order of arrival: attention, FFN, or one direction of a link."""

    __slots__ = ("env", "free_at", "queue")

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.free_at = 0.0
        self.queue = simpy.Resource(env)  # used step by step only

    def reserve(self, ready: float, duration: float) -> float:
        """Serve the microbatch that is ready next; returns the time at which service begins."""
        free_at = self.free_at
        start = free_at if free_at > ready else ready
        self.free_at = start + duration
        return start

    def serve(self, duration: float) -> Generator[Event, None, float]:
        """Queue, be served, leave; returns the time spent in the queue."""
        begin = self.env.now
        with self.queue.request() as turn:
            yield turn
            wait = self.env.now - begin
            yield self.env.timeout(duration)
        return wait


@dataclass(slots=True)
class _Part:
    """An instance's part of a microbatch step: its durations, when it last reached the FFN, and how long it waited."""

    instance: int
    attention: float
    transfer: float
    arrived: float = 0.0
    attention_wait: float = 0.0
    ffn_wait: float = 0.0


class Steps:
    """The stages of a bundle, which a microbatch passes `layers` times a decode step."""

    def __init__(self, env: Environment, config: BundleConfig) -> None:
        self.env = env
        self.config = config
        self._lockstep = config.advance == "lockstep"  # all attention instances are one server
        self._in_order = self._lockstep or config.ffn_order == "in_order"
        servers = range(1 if self._lockstep else config.attention_instances)
        self.attention = [Stage(env) for _ in servers]
        self.outward = [Stage(env) for _ in servers]
        self.ffn = Stage(env)
        self.homeward = Stage(env)

    def run(self, microbatch: Microbatch) -> Generator[Event, None, Waits]:
        """Take a microbatch through every layer; waits are means over the instances that have requests in it."""
        config, latency, loads, active = self.config, self.config.latency, microbatch.loads, microbatch.active
        alpha, beta = latency.attention
        transfer = transfer_time(latency, max(active))
        ffn = ffn_time(latency, microbatch.requests, config.ffn_instances)
        if self._lockstep:
            passes = self._reserve_lockstep if config.fast_forward else self._walk_lockstep
            return (yield from passes(alpha * max(loads) + beta, transfer, ffn))
        parts = [
            _Part(instance, alpha * loads[instance] + beta, transfer_time(latency, requests))
            for instance, requests in enumerate(active)
            if requests
        ]
        go_round = self._reserve_round if config.fast_forward and self._in_order else self._walk_round
        way_back_wait = 0.0
        for _ in range(config.layers):
            way_back_wait += yield from go_round(parts, ffn, transfer)
        attention_wait = sum(part.attention_wait for part in parts) / len(parts)
        return attention_wait + way_back_wait, sum(part.ffn_wait for part in parts) / len(parts)

    def _reserve_lockstep(self, attention: float, transfer: float, ffn: float) -> Generator[Event, None, Waits]:
        """One event a pass: all stages are reserved at once, which is exact because no microbatch overtakes."""
        env, attention_wait, ffn_wait = self.env, 0.0, 0.0
        for _ in range(self.config.layers):
            ready = env.now
            begin = self.attention[0].reserve(ready, attention)
            attended = begin + attention
            departure = self.outward[0].reserve(attended, transfer)
            arrival = departure + transfer
            ffn_begin = self.ffn.reserve(arrival, ffn)
            ffn_end = ffn_begin + ffn
            way_back = self.homeward.reserve(ffn_end, transfer)
            yield env.at(way_back + transfer)
            attention_wait += (begin - ready) + (way_back - ffn_end)
            ffn_wait += (departure - attended) + (ffn_begin - arrival)
        return attention_wait, ffn_wait

    def _walk_lockstep(self, attention: float, transfer: float, ffn: float) -> Generator[Event, None, Waits]:
        """An event for each state: the reference for the fast path."""
        attention_wait = ffn_wait = 0.0
        for _ in range(self.config.layers):
            part = _Part(0, attention, transfer)
            way_back_wait = yield from self._walk_round([part], ffn, transfer)
            attention_wait += part.attention_wait + way_back_wait
            ffn_wait += part.ffn_wait
        return attention_wait, ffn_wait

    def _reserve_round(self, parts: list[_Part], ffn: float, transfer: float) -> Generator[Event, None, float]:
        """One pass as one event; returns the wait for the way back."""
        env, attention, outward = self.env, self.attention, self.outward
        ready = env.now
        complete = 0.0
        for part in parts:
            begin = attention[part.instance].reserve(ready, part.attention)
            attended = begin + part.attention
            departure = outward[part.instance].reserve(attended, part.transfer)
            part.arrived = arrival = departure + part.transfer
            part.attention_wait += begin - ready
            part.ffn_wait += departure - attended
            if arrival > complete:
                complete = arrival
        ffn_begin = self.ffn.reserve(complete, ffn)
        for part in parts:
            part.ffn_wait += ffn_begin - part.arrived
        ffn_end = ffn_begin + ffn
        way_back = self.homeward.reserve(ffn_end, transfer)
        yield env.at(way_back + transfer)
        return way_back - ffn_end

    def _walk_round(self, parts: list[_Part], ffn: float, transfer: float) -> Generator[Event, None, float]:
        """One pass with an event for each state: the reference for the fast path."""
        env, stage = self.env, self.ffn
        # A place in the FFN's queue: taken when the microbatch sets out, or when it is complete.
        place = stage.queue.request() if self._in_order else None
        yield env.all_of([env.process(self._attend(part)) for part in parts])
        turn = place or stage.queue.request()
        yield turn
        for part in parts:
            part.ffn_wait += env.now - part.arrived
        yield env.timeout(ffn)
        stage.queue.release(turn)
        return (yield from self.homeward.serve(transfer))

    def _attend(self, part: _Part) -> Generator[Event, None, None]:
        """One instance's attention and its way to the FFN."""
        part.attention_wait += yield from self.attention[part.instance].serve(part.attention)
        part.ffn_wait += yield from self.outward[part.instance].serve(part.transfer)
        part.arrived = self.env.now


def transfer_time(latency: PassLatency, requests: int) -> float:
    """One direction of the link for the requests of one attention instance."""
    alpha, beta = latency.communication
    return (alpha * requests + beta) / 2


def ffn_time(latency: PassLatency, requests: int, ffn_instances: int) -> float:
    """The FFN for all requests of a microbatch, shared evenly by the FFN instances."""
    alpha, beta = latency.ffn
    return alpha * (requests / ffn_instances) + beta


IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BundleConfig:
    """The shape of a bundle. `layers` passes make one decode step; `ffn_order` makes no difference in lockstep."""

    attention_instances: int
    ffn_instances: int
    batch_size: int
    latency: PassLatency
    microbatches: int
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


Step = IntEnum("Step", "MICROBATCH READY END ATTENTION_WAIT FFN_WAIT LOAD_MAX LOAD_TOTAL REQUESTS AT_WORK", start=0)
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
        self._steps = Steps(self.env, config)
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
        loads, active = microbatch.loads, microbatch.active
        waits, at_work = (attention_wait, ffn_wait), len(active) - active.count(0)
        row = (microbatch.index, ready, self.env.now, *waits, max(loads), sum(loads), microbatch.requests, at_work)
        self.records.steps.append(row)
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
