"""Prefill and decode engines of one or several models on this machine, profiled and replayed by direct execution.

A step of a worker, as the twin counts it, is more than its engine's: the worker also takes messages and blocks before
it, and reports after it. So a step begins when the worker can turn to it: when it has reported the step before and sent
that step's caches, or when a message has ended its wait. It ends with its report. The steps of a busy worker follow
each other without a gap.

The profiled topology is the one that is to be predicted, since its workers take messages, blocks and each other's
caches out of the processor: a step there takes longer than in an engine alone. Rounds are as in
`live.validation.profiling`, with that number of sequences for each decode engine; they end after `max_steps` steps of
each. Requests are spread evenly over models.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from latency_models.sources.engine_regression import describe
from latency_models.stages import MessageLink
from latency_models.timed_runs import ProfiledRounds, ReplayedRun, Span
from live.device import no_garbage_collection
from live.engine import Engine, Progress
from live.generation import GREEDY, Generation, make_generation
from live.loaded_model import LoadedModel, LoadedSource, SharedModels
from live.topologies.deployment import OnProgress
from live.topologies.direct_time import RecordedTime
from live.topologies.local import LocalTopology
from live.topologies.pools.layout import FRONT, SENT, kv_bytes, pools_layout
from live.topologies.processes import PoolsDeployment
from live.validation.backend import (
    IN_TURNS_SEED,
    Requests,
    WithoutDrafts,
    generations_of,
    model_source,
    profiling_limits,
    replayed_run,
)
from live.validation.profiling import (
    Profile,
    ProfilingLimits,
    Round,
    sequences_left,
)
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec, ValidationScenario, engine_pools
from schedulers.step_policies import ChunkPolicy
from workloads.errors import BadInput


@dataclass(frozen=True)
class RoleSteps:
    """The spans of one engine, and of steps whose caches left before the next: how many, and seconds to the last."""

    spans: list[Span]
    hand_overs: list[tuple[int, float]]


def role_steps(time: RecordedTime, rank: int, steps: Sequence[Span]) -> RoleSteps:
    """The steps of a worker, of those of its engine (`Engine.watch`)."""
    turns = time.turns.get(rank, [])
    ends = [turn.end for turn in turns]
    released = [post.departure for post in time.posts.get(rank, []) if post.kind == SENT]
    spans: list[Span] = []
    hand_overs: list[tuple[int, float]] = []
    last_turn, last_end = -1, 0.0
    for batch, begin, end in steps:
        place = bisect.bisect_left(ends, end)
        releases = released[bisect.bisect_left(released, last_end) : bisect.bisect_left(released, begin)]
        if releases and spans:
            hand_overs.append((len(releases), releases[-1] - last_end))
        waits = [turn.begin for turn in turns[last_turn + 1 : place + 1] if turn.waited]
        spans.append((batch, max([last_end, *releases[-1:], *waits[-1:]]), ends[place]))
        last_turn, last_end = place, ends[place]
    return RoleSteps(spans, hand_overs)


def route_seconds(time: RecordedTime, arrivals: Sequence[float]) -> list[float]:
    """Seconds of each request from its arrival at the front to that of the next message that brings an engine work."""
    posts = [post for post in time.posts.get(FRONT, []) if post.size]
    places = [bisect.bisect_left(posts, arrival, key=lambda post: post.departure) for arrival in arrivals]
    return [posts[i].arrival - arrival for i, arrival in zip(places, arrivals, strict=True) if i < len(posts)]


def deliver_seconds(spans: Sequence[Span], generations: Mapping[int, Generation]) -> list[float]:
    """Seconds of each prompt from the end of its last step to the first token at the front."""
    ends = [(chunk.sequence.request.id, end) for batch, _, end in spans for chunk in batch.chunks if chunk.last]
    tokens = [(generations[i].first_token, end) for i, end in ends if i in generations]
    return [first_token - end for first_token, end in tokens if first_token >= end]


def frontend_times(
    routes: Sequence[float], deliveries: Sequence[float], hand_overs: Sequence[tuple[int, float]]
) -> dict[str, float]:
    """Fields of `system.frontend`: medians."""
    per_cache = [seconds / count for count, seconds in hand_overs]
    samples: dict[str, Sequence[float]] = {"route": routes, "deliver": deliveries, "hand_over": per_cache}
    return {name: float(np.median(values)) if len(values) else 0.0 for name, values in samples.items()}


def watch_steps(engine: Engine) -> list[Span]:
    """A list that takes in the engine's steps as they end."""
    steps: list[Span] = []
    engine.watch = lambda batch, begin, end: steps.append((batch, begin, end))
    return steps


APART = 0.003
"""Seconds between the first requests of a round: else all prompts of a step would be of one length limit."""

TURNS = 64
"""Resumptions of roles after which something else may go on."""

MakePools = Callable[[RecordedTime, OnProgress], LocalTopology]


class PoolsProfile(Profile):
    """A profile of a topology."""

    def __init__(
        self, make_pools: MakePools, time: RecordedTime, models: Sequence[str], decode_ranks: Sequence[int],
        limits: ProfilingLimits, vocabulary: int, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(limits, seed)
        self._time = time
        self._models = models
        self._vocabulary = vocabulary
        self._pools = make_pools(time, self._note)
        self._decode_ranks = decode_ranks
        self._block_size = self._pools.workers[0].engine.core.config.block_size
        self._steps = {rank: watch_steps(worker.engine) for rank, worker in enumerate(self._pools.workers, start=1)}
        self._next_id = 0
        self._active: dict[int, Generation] = {}
        self._generations: dict[int, Generation] = {}
        self._size = Round(1, 1, 1)
        self._max_steps = 0
        self._routes: list[float] = []
        self._deliveries: list[float] = []
        self._hand_overs: list[tuple[int, float]] = []

    def go_on(self) -> None:
        """Let the roles take some more turns."""
        next(self._turns)

    def take(self) -> ProfiledRounds:
        frontend = frontend_times(self._routes, self._deliveries, self._hand_overs)
        for samples in (self._routes, self._deliveries, self._hand_overs):
            samples.clear()
        return replace(super().take(), frontend=frontend)

    def _round(self, size: Round, max_steps: int) -> Iterator[None]:
        """Run one round, and pause after every `TURNS` resumptions of roles."""
        self._size = size
        self._max_steps = max_steps
        self._generations.clear()
        self._time.restart()
        for steps in self._steps.values():
            steps.clear()
        arrivals = [i * APART for i in range(size.num_seqs * len(self._decode_ranks))]
        for arrival in arrivals:
            self._pools.network.at(FRONT, arrival, partial(self._pools.submit, self._random_request()))
        while not self._pools.network.run_some(TURNS):
            yield
        self._add_round(arrivals)

    def _add_round(self, arrivals: Sequence[float]) -> None:
        spans: list[Span] = []
        for rank, timed in self._steps.items():
            steps = role_steps(self._time, rank, timed)
            spans += steps.spans
            self._hand_overs += steps.hand_overs
        self._rounds.append([(begin, describe(batch, self._block_size, end - begin)) for batch, begin, end in spans])
        self._routes += route_seconds(self._time, arrivals)
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
            self._pools.front.abort(request_id)
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


class PoolsBackend(WithoutDrafts, LoadedModel):
    """The pools of a scenario, on the CPU; `BadInput` as of `LoadedModel`, or for a link of other bytes a token."""

    def __init__(self, scenario: ValidationScenario, base: Path) -> None:
        spec, link = scenario.model, scenario.system.kv_link
        assert link is not None
        super().__init__(model_source(spec, base, scenario.seed))
        if link.bytes_per_token != (expected := kv_bytes(self.decoder.config, spec.dtype)):
            raise BadInput(
                f"expected {expected}, the bytes of the model's KV cache of a token",
                field="system.link.bytes_per_token",
                value=link.bytes_per_token,
            )
        serving, pools = engine_pools(scenario.serving_without_times(), {}, base / "scenario")
        self._layout, _ = pools_layout(serving, pools)
        names = sorted({place.module for place in self._layout.engines if place.module is not None})
        if names and spec.weights != "random":
            raise BadInput("expected random with several models", field="model.weights", value=spec.weights)
        modules = {  # each with random weights of its own
            name: replace(model_source(spec, base, seed), rounding=None)
            for seed, name in enumerate(names, start=scenario.seed + 1)
        }
        self._deployment = PoolsDeployment(LoadedSource.of(self.decoder), self._layout, modules)
        self._models = SharedModels()
        self._link = MessageLink(link.latency, link.bandwidth)
        self._spec = scenario.profiling
        self._profile_in_turns: PoolsProfile | None = None

    @property
    def models(self) -> list[str]:
        """Names of the models that requests may be for."""
        return list(self._layout.prefill)

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        """Time steps of random requests in this topology (`live.validation.pools`)."""
        return self._new_profile(scheduler, spec, seed).run()

    def _new_profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> PoolsProfile:
        decode_ranks, time = sorted(set(chain(*self._layout.decode.values()))), RecordedTime(self._link)
        limits = profiling_limits(scheduler, spec)
        return PoolsProfile(self._pools, time, self.models, decode_ranks, limits, self.vocabulary, seed)

    def _pools(
        self,
        time: RecordedTime,
        on_progress: OnProgress,
        chunks: Callable[[], ChunkPolicy | None] = lambda: None,
    ) -> LocalTopology:
        deployment = replace(self._deployment, chunks=(chunks,) * len(self._layout.engines))
        return LocalTopology(deployment, self._models, on_progress, timekeeper=time, packed=True)

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedRun:
        """Send each request to the front at its arrival time; a profile in turns goes on where it paused before."""
        unsorted = generations_of(requests, self.vocabulary, scheduler.config.prefix_id_tokens)
        generations = sorted(unsorted, key=lambda generation: generation.request.arrival)
        if self._spec.in_turns and self._profile_in_turns is None:
            self._profile_in_turns = self._new_profile(scheduler, self._spec, IN_TURNS_SEED)
        profile, time = self._profile_in_turns, RecordedTime(self._link)
        pools = self._pools(time, _note_times, scheduler.chunk_policy)
        time.restart()
        steps = {rank: watch_steps(worker.engine) for rank, worker in enumerate(pools.workers, start=1)}
        for generation in generations:
            pools.front.check(generation)
            pools.network.at(FRONT, generation.request.arrival, partial(pools.submit, generation))
        with no_garbage_collection():
            while not pools.network.run_some(TURNS):
                if profile is not None:
                    profile.go_on()
        spans = [span for rank, timed in steps.items() for span in role_steps(time, rank, timed).spans]
        run = replayed_run(generations, [generation.submitted for generation in generations], spans)
        return replace(run, profiled=None if profile is None else profile.take())


def _note_times(progress: Progress) -> None:
    for generation in progress.advanced:
        generation.times.append(generation.last_token)
