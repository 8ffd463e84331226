"""Timed steps of random requests in a topology of pools, and the work between steps.

The topology is the one that is to be predicted, since its workers take messages, blocks and each other's caches out of
the processor: a step there takes longer than in an engine alone. Rounds are as in `live.validation.profiling`, with
that number of sequences for each decode engine; they end after `max_steps` steps of each. Requests are spread evenly
over models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from latency_models.sources.engine_regression import Step, describe
from live.engine import Progress
from live.generation import Generation, make_generation
from live.memory import no_garbage_collection
from live.topologies.pools.deployment import LocalPools
from live.topologies.pools.layout import FRONT
from live.validation.clients import GREEDY
from live.validation.profiling import (
    WARM_UP_STEPS,
    ProfilingLimits,
    ProfilingResult,
    Round,
    random_sizes,
    sequences_left,
    warm_up_round,
)
from live.validation.role_steps import (
    RecordedTime,
    Span,
    deliver_seconds,
    frontend_times,
    role_steps,
    route_seconds,
    watch_steps,
)

APART = 0.003
"""Seconds between the first requests of a round: else all prompts of a step would be of one length limit."""

TURNS = 64
"""Resumptions of roles after which something else may go on."""

MakePools = Callable[[RecordedTime, Callable[[Progress], None]], LocalPools]


class PoolsProfile:
    """A profile of a topology under way: one round to warm up, then others without end."""

    def __init__(
        self, make_pools: MakePools, time: RecordedTime, models: Sequence[str], decode_ranks: Sequence[int],
        limits: ProfilingLimits, vocabulary: int, seed: int,
    ) -> None:  # fmt: skip
        self._time = time
        self._models = models
        self._limits = limits
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng([seed, 23])
        self._pools = make_pools(time, self._note)
        self._decode_ranks = decode_ranks
        self._block_size = self._pools.workers[0].engine.core.config.block_size
        self._steps = {rank: watch_steps(worker.engine) for rank, worker in enumerate(self._pools.workers, start=1)}
        self._next_id = 0
        self._active: dict[int, Generation] = {}
        self._generations: dict[int, Generation] = {}
        self._size = Round(1, 1, 1)
        self._max_steps = 0
        self._arrivals: list[float] = []
        self._clear()
        self._turns = self._run()

    def _clear(self) -> None:
        self._rounds: list[list[tuple[float, Step]]] = []
        self._routes: list[float] = []
        self._deliveries: list[float] = []
        self._hand_overs: list[tuple[int, float]] = []

    def go_on(self) -> None:
        """Let the roles take some more turns."""
        next(self._turns)

    def run(self, rounds: int) -> ProfilingResult:
        """Run `rounds` rounds."""
        with no_garbage_collection():
            while len(self._rounds) < rounds:
                self.go_on()
        return self.take()

    def take(self) -> ProfilingResult:
        """The rounds that have ended since the last call."""
        frontend = frontend_times(self._routes, self._deliveries, self._hand_overs)
        result = ProfilingResult(self._rounds, frontend)
        self._clear()
        return result

    def _run(self) -> Iterator[None]:
        yield from self._round(warm_up_round(self._limits), WARM_UP_STEPS)
        while True:
            for size in map(Round, *random_sizes(self._rng, self._limits)):
                yield from self._round(size, self._limits.max_steps)
                self._add_round()
                yield

    def _round(self, size: Round, max_steps: int) -> Iterator[None]:
        """Run one round, and pause after every `TURNS` resumptions of roles."""
        self._size = size
        self._max_steps = max_steps
        self._generations.clear()
        self._time.restart()
        for steps in self._steps.values():
            steps.clear()
        self._arrivals = [i * APART for i in range(size.num_seqs * len(self._decode_ranks))]
        for arrival in self._arrivals:
            self._pools.network.at(FRONT, arrival, partial(self._pools.submit, self._random_request()))
        while not self._pools.network.run_some(TURNS):
            yield

    def _add_round(self) -> None:
        spans: list[Span] = []
        for rank, timed in self._steps.items():
            steps = role_steps(self._time, rank, timed)
            spans += steps.spans
            self._hand_overs += steps.hand_overs
        self._rounds.append([(begin, describe(batch, self._block_size, end - begin)) for batch, begin, end in spans])
        self._routes += route_seconds(self._time, self._arrivals)
        self._deliveries += deliver_seconds(spans, self._generations)

    def _note(self, progress: Progress) -> None:
        """Replace finished requests, or abort some, as the round wants."""
        for generation in progress.finished:
            self._active.pop(generation.request.id, None)
        engines = len(self._decode_ranks)
        step = sum(len(self._steps[rank]) for rank in self._decode_ranks) // engines
        target = 0
        if step < self._max_steps:
            target = sequences_left(self._size.num_seqs, step, self._max_steps) * engines
        while len(self._active) > target:
            request_id, _ = self._active.popitem()
            self._pools.frontend.abort(request_id)
        for _ in range(min(len(progress.finished), target - len(self._active))):
            self._pools.submit(self._random_request())

    def _random_request(self) -> Generation:
        rng, size = self._rng, self._size
        with self._time.paused():
            prompt = rng.integers(self._vocabulary, size=int(rng.integers(1, size.max_prompt_tokens + 1)))
            output = int(rng.integers(2, max(size.max_output_tokens, 2) + 1))  # one of 1 has no decode step
            self._next_id += 1
            generation = make_generation(
                self._next_id, prompt, output, sampling_params=GREEDY, block_size=self._block_size,
                model=self._models[int(rng.integers(len(self._models)))],
            )  # fmt: skip
        self._generations[self._next_id] = self._active[self._next_id] = generation
        return generation
