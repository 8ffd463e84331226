"""The simulation of one AFD bundle (AFD 3.1 and 5.1): x attention instances feed y FFN instances.

A microbatch goes round six states: attention, A→F transfer, wait, FFN, F→A transfer, wait. Its attention phase ends
with the slowest of the x instances (the barrier); m microbatches are in flight, so that one computes attention while
another is in transfer or at the FFN. Attention, the two directions of the link, and the FFN each serve one microbatch
at a time, in order of arrival.

All four serve in order, and every microbatch visits them in the same order, so none overtakes another. When a
microbatch sets out, all its waiting times are therefore known. With `fast_forward` one event carries it round; without
it each state is an event of its own. Both give the same records to the last bit (`tests/parity`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import Event

from latency_models.pass_latency import PassLatency
from schedulers.bundle_slots import BundleSlots, Microbatch, Refill, refill_fcfs
from twin.environment import Environment

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BundleConfig:
    """The shape of a bundle. `layers` passes make one decode step."""

    attention_instances: int
    ffn_instances: int
    batch_size: int
    latency: PassLatency
    microbatches: int = 2
    layers: int = 1
    refill: Refill = refill_fcfs
    fast_forward: bool = True


@dataclass(frozen=True, slots=True)
class Supply:
    """The requests of a bundle, by id 0, 1, …, in order of arrival.

    Arrays of one length. `prefill` and `decode` are tokens; `arrivals` are times (None: all there from the start, the
    closed loop). The run ends when `completions` of them have finished (None: all): a closed loop with more requests
    than that keeps its slots full to the end; otherwise it drains. A request that is in progress at a stationary start
    has its generated tokens counted into `prefill` and taken off `decode`.
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
        """A supply from plain lists."""
        times = None if arrivals is None else np.array(arrivals, dtype=np.float64)
        return cls(np.array(prefill, dtype=np.int64), np.array(decode, dtype=np.int64), times, completions)


StepRow = tuple[int, float, float, float, float, int, int, int, int]


@dataclass(slots=True)
class BundleRecords:
    """The records of one run. `steps` has one row for each microbatch step, in order of their ends.

    Columns of `steps`: microbatch, ready (set out), end, time waited for attention and for the FFN (links included,
    over all layers), largest token load of an instance, token load over all instances, requests, attention instances
    at work. `seated[id]` is microbatch + m·step of admission, −1 if it never came to that: one integer, since there
    may be millions. `full_until` is when a slot first stayed empty for want of requests (None: never).
    """

    steps: list[StepRow] = field(default_factory=list)
    seated: list[int] = field(default_factory=list)
    full_until: float | None = None


class Stage:
    """A server that takes one microbatch at a time, in order of arrival: attention, FFN, or one direction of the
    link."""

    __slots__ = ("free_at", "queue")

    def __init__(self, env: Environment) -> None:
        self.free_at = 0.0
        self.queue = simpy.Resource(env)  # used step by step only

    def reserve(self, ready: float, duration: float) -> float:
        """Serve the microbatch that is ready next; returns the time at which service begins."""
        free_at = self.free_at
        start = free_at if free_at > ready else ready
        self.free_at = start + duration
        return start


class Bundle:
    """One bundle, its supply of requests, and the records of its run. Call `run` once."""

    def __init__(self, config: BundleConfig, supply: Supply) -> None:
        self.config = config
        self._prefill, self._decode = supply.prefill.tolist(), supply.decode.tolist()
        self._arrivals: list[float] | None = None if supply.arrivals is None else supply.arrivals.tolist()
        self.env = Environment()
        self.slots = BundleSlots(config.attention_instances, config.microbatches, config.batch_size, config.refill)
        self.records = BundleRecords(seated=[-1] * len(self._prefill))
        self.attention, self.outward, self.ffn, self.homeward = (Stage(self.env) for _ in range(4))
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
        go_round = self._reserve_round if self.config.fast_forward else self._walk_round
        layers = range(self.config.layers)
        env, begin_step = self.env, self._begin_step
        while True:
            microbatch = begin_step(index)
            if microbatch is None:
                if self._arrivals is None or self._arrived == len(self._arrivals):
                    return
                yield env.at(self._arrivals[self._arrived])
                continue
            ready = env.now
            durations = self._durations(microbatch)
            attention_wait = ffn_wait = 0.0
            for _ in layers:
                waits = yield from go_round(*durations)
                attention_wait += waits[0]
                ffn_wait += waits[1]
            self._end_step(microbatch, ready, attention_wait, ffn_wait)

    def _reserve_round(
        self, attention: float, transfer: float, ffn: float
    ) -> Generator[Event, None, tuple[float, float]]:
        """One pass as one event: all stages are reserved at once, which is exact because no microbatch overtakes."""
        env = self.env
        ready = env.now
        begun = self.attention.reserve(ready, attention)
        attended = begun + attention
        sent = self.outward.reserve(attended, transfer)
        arrived = sent + transfer
        taken = self.ffn.reserve(arrived, ffn)
        done = taken + ffn
        returned = self.homeward.reserve(done, transfer)
        yield env.at(returned + transfer)
        return (begun - ready) + (returned - done), (sent - attended) + (taken - arrived)

    def _walk_round(self, attention: float, transfer: float, ffn: float) -> Generator[Event, None, tuple[float, float]]:
        """One pass with an event for each state: the reference for the fast path."""
        for_attention = yield from self._serve(self.attention, attention)
        for_link = yield from self._serve(self.outward, transfer)
        for_ffn = yield from self._serve(self.ffn, ffn)
        for_way_back = yield from self._serve(self.homeward, transfer)
        return for_attention + for_way_back, for_link + for_ffn

    def _serve(self, stage: Stage, duration: float) -> Generator[Event, None, float]:
        """Queue, be served, leave; returns the time spent in the queue."""
        asked = self.env.now
        with stage.queue.request() as turn:
            yield turn
            waited = self.env.now - asked
            yield self.env.timeout(duration)
        return waited

    # What happens at the edges of a step

    def _durations(self, microbatch: Microbatch) -> tuple[float, float, float]:
        """Attention (of the slowest instance), transfer one way, and FFN, for one pass."""
        latency = self.config.latency
        (alpha_a, beta_a), (alpha_f, beta_f), (alpha_c, beta_c) = (
            latency.attention,
            latency.ffn,
            latency.communication,
        )
        return (
            alpha_a * max(microbatch.loads) + beta_a,
            (alpha_c * max(microbatch.active) + beta_c) / 2,
            alpha_f * (microbatch.requests / self.config.ffn_instances) + beta_f,
        )

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
        """Queue the requests that have arrived by now."""
        assert self._arrivals is not None
        arrived, arrivals, now = self._arrived, self._arrivals, self.env.now
        while arrived < len(arrivals) and arrivals[arrived] <= now:
            arrived += 1
        self._submit(arrived)

    def _submit(self, until: int) -> None:
        ids = range(self._arrived, until)
        self.slots.submit(zip(ids, self._prefill[self._arrived : until], strict=True))
        self._arrived = until
