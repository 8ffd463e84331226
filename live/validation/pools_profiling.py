"""Timed steps of random requests in a topology of pools, and the work between steps.

The topology is the one that is to be predicted, since its workers take messages, blocks and each other's caches out of
the processor: a step there takes longer than in an engine alone. Rounds are as in `live.validation.profiling`, of so
many sequences for each decode engine, and they end after so many steps of each. Requests are spread evenly over models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from latency_models.sources.engine_regression import Step, describe
from live.engine import Progress
from live.generation import Generation, make_generation
from live.memory import no_garbage_collection
from live.topologies.pools.deployment import LocalPools
from live.topologies.pools.layout import FRONT
from live.validation.profiling import ProfilingLimits, ProfilingResult, Round, sequences_left, stratified_sizes
from live.validation.prompts import GREEDY
from live.validation.role_steps import (
    RecordedTime,
    Span,
    deliver_seconds,
    frontend_times,
    role_steps,
    route_seconds,
    watch_into,
)

WARM_UP_STEPS = 40
"""Steps of each decode engine before the first round, which are discarded."""

APART = 0.003
"""Seconds between the first requests of a round: else all prompts of a step would be of one length limit."""

TURNS = 64
"""Resumptions of roles after which something else may go on."""

MakePools = Callable[[RecordedTime, Callable[[Progress], None]], LocalPools]


@dataclass(frozen=True)
class ProfiledRound:
    """The measurements of a round: steps, each with its begin; samples of `route` and `deliver`; and hand-overs."""

    steps: list[tuple[float, Step]]
    routes: list[float]
    deliveries: list[float]
    hand_overs: list[tuple[int, float]]


class PoolsProfiler:
    """Runs rounds in one topology.

    Args:
        make_pools: makes the topology with these clocks and this `on_progress`.
        models: names of the models. decode_ranks: ranks of the decode engines.
        rng: draws token ids and lengths.
    """

    def __init__(
        self, make_pools: MakePools, time: RecordedTime, models: Sequence[str], decode_ranks: Sequence[int],
        vocabulary: int, rng: np.random.Generator,
    ) -> None:  # fmt: skip
        self._time, self._models, self._vocabulary, self._rng = time, models, vocabulary, rng
        self._pools = make_pools(time, self._note)
        self._decode_ranks = decode_ranks
        self._block_size = self._pools.workers[0].engine.core.config.block_size
        self._steps: dict[int, list[Span]] = {rank + 1: [] for rank in range(len(self._pools.workers))}
        for worker, steps in zip(self._pools.workers, self._steps.values(), strict=True):
            worker.engine.watch = watch_into(steps)
        self._next_id = 0
        self._active: dict[int, Generation] = {}
        self._known: dict[int, Generation] = {}
        self._size, self._max_steps = Round(1, 1, 1), 0
        self._arrivals: list[float] = []

    def turns(self, size: Round, max_steps: int) -> Iterator[None]:
        """Run one round, and pause after every `TURNS` resumptions of roles. `result` has what it measured."""
        self._size, self._max_steps = size, max_steps
        self._known.clear()
        self._time.restart()
        for steps in self._steps.values():
            steps.clear()
        self._arrivals = []
        for i in range(size.num_seqs * len(self._decode_ranks)):
            generation = self._make()
            self._known[generation.request.id] = self._active[generation.request.id] = generation
            self._arrivals.append(i * APART)
            self._pools.network.at(FRONT, i * APART, partial(self._pools.submit, generation))
        while not self._pools.network.run_some(TURNS):
            yield

    def result(self) -> ProfiledRound:
        """The measurements of the round that has ended."""
        spans: list[Span] = []
        hand_overs: list[tuple[int, float]] = []
        for rank, timed in self._steps.items():
            found = role_steps(self._time, rank, timed)
            spans += found.spans
            hand_overs += found.hand_overs
        steps = [(begin, describe(batch, self._block_size, end - begin)) for batch, begin, end in spans]
        routes = route_seconds(self._time, self._arrivals)
        return ProfiledRound(steps, routes, deliver_seconds(spans, self._known), hand_overs)

    def _note(self, progress: Progress) -> None:
        """Replace finished requests, or abort some, as the round wants."""
        for generation in progress.finished:
            self._active.pop(generation.request.id, None)
        engines = len(self._decode_ranks)
        step = sum(len(self._steps[rank]) for rank in self._decode_ranks) // engines
        left = 0
        if step < self._max_steps:
            left = sequences_left(self._size.num_seqs, step, self._max_steps) * engines
        while len(self._active) > left:
            request_id, _ = self._active.popitem()
            self._pools.frontend.abort(request_id)
        for _ in range(min(len(progress.finished), left - len(self._active))):
            generation = self._make()
            self._known[generation.request.id] = self._active[generation.request.id] = generation
            self._pools.submit(generation)

    def _make(self) -> Generation:
        """A request of random length within the round's limits; no role's work."""
        rng, size = self._rng, self._size
        with self._time.paused():
            prompt = rng.integers(self._vocabulary, size=int(rng.integers(1, size.max_prompt_tokens + 1)))
            output = int(rng.integers(2, max(size.max_output_tokens, 2) + 1))  # one of 1 has no decode step
            self._next_id += 1
            return make_generation(
                self._next_id, prompt, output, sampling_params=GREEDY, block_size=self._block_size,
                model=self._models[int(rng.integers(len(self._models)))],
            )  # fmt: skip


class PoolsProfile:
    """A profile of a topology under way: one round to warm up, then others without end.

    Args:
        as of `PoolsProfiler`; limits: of each `rounds` rounds. seed: of lengths and tokens.
    """

    def __init__(
        self, make_pools: MakePools, time: RecordedTime, models: Sequence[str], decode_ranks: Sequence[int],
        limits: ProfilingLimits, vocabulary: int, seed: int,
    ) -> None:  # fmt: skip
        self._limits, self._rng = limits, np.random.default_rng([seed, 23])
        self._profiler = PoolsProfiler(make_pools, time, models, decode_ranks, vocabulary, self._rng)
        self._done: list[ProfiledRound] = []
        self._turns = self._run()

    def go_on(self) -> None:
        """Let the roles take some more turns."""
        next(self._turns)

    def run(self, rounds: int) -> ProfilingResult:
        """Run so many rounds."""
        with no_garbage_collection():
            while len(self._done) < rounds:
                self.go_on()
        return self.take()

    def take(self) -> ProfilingResult:
        """The rounds that have ended since the last call."""
        done, self._done = self._done, []
        frontend = frontend_times(
            [each for one in done for each in one.routes],
            [each for one in done for each in one.deliveries],
            [each for one in done for each in one.hand_overs],
        )
        return ProfilingResult([each.steps for each in done], frontend)

    def _run(self) -> Iterator[None]:
        limits, profiler = self._limits, self._profiler
        warm_up = Round(min(limits.max_num_seqs, 4), limits.max_prompt_tokens, limits.max_output_tokens)
        yield from profiler.turns(warm_up, WARM_UP_STEPS)
        while True:
            most = limits.max_num_seqs, limits.max_prompt_tokens, limits.max_output_tokens
            sizes = [stratified_sizes(self._rng, limits.rounds, largest, power=2) for largest in most]
            for size in map(Round, *sizes):
                yield from profiler.turns(size, limits.max_steps)
                self._done.append(profiler.result())
                yield
