"""An autoscaled fleet of engines of one model on this machine, profiled and replayed by direct execution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from latency_models.sources.engine_regression import Step
from live.clock import Clock, DirectClock
from live.engine import Engine
from live.generation import Generation, make_generation
from live.loaded_model import LoadedModel
from live.memory import no_garbage_collection
from live.validation.backend import (
    IN_TURNS_SEED,
    Requests,
    WithoutDrafts,
    generations_of,
    model_source,
    profiling_limits,
)
from live.validation.clients import GREEDY
from live.validation.fleet import Fleet, FleetEngine
from live.validation.profiling import EngineProfile, ProfilingResult
from live.validation.replay import request_columns, step_spans
from scenarios.engine import SchedulerPlan, make_router
from scenarios.system import ColocatedSpec
from scenarios.validation import ProfilingSpec, ValidationScenario
from schedulers.batches import Batch
from schedulers.replica_set import ScalingLog

Floats = npt.NDArray[np.float64]

ROUNDS_KEPT = 4
"""Of the rounds that a profile in turns has, every fourth is fitted: they are as many as a fleet's steps."""

WARM_UP_OUTPUT = 4
"""Tokens that an engine computes before it is up, behind a prompt that fills a step."""


@dataclass(frozen=True)
class ReplayedFleet:
    """A replayed workload, in seconds of each engine's own clock. `scaling`: the engines over time."""

    generations: Sequence[Generation]
    spans: Sequence[tuple[Batch, float, float]]
    profiled: ProfilingResult | None
    scaling: ScalingLog
    speculation: ClassVar[None] = None

    @property
    def token_times(self) -> list[list[float]]:
        """The times of each request's output tokens."""
        return [generation.times for generation in self.generations]

    def columns(self) -> dict[str, Floats]:
        """One entry a request: arrival, noticed (taken in by its engine), first_token, last_token, output_tokens."""
        return request_columns(self.generations, [generation.submitted for generation in self.generations])


class FleetBackend(WithoutDrafts, LoadedModel):
    """Fleets of a scenario, on the CPU; `BadInput` as of `LoadedModel`.

    Steps are profiled in turns with those of another engine, as a fleet's engines take turns: each finds another one's
    weights in the processor's caches.
    """

    def __init__(self, scenario: ValidationScenario, base: Path) -> None:
        self._source = model_source(scenario.model, base, scenario.seed)
        super().__init__(self._source)
        assert isinstance(scenario.system, ColocatedSpec)
        assert scenario.fleet is not None
        self._system, self._spec = scenario.system, scenario.fleet
        self._seed = scenario.seed
        self._profiling = scenario.profiling
        self._profile_in_turns: EngineProfile | None = None

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfilingResult:
        """Time the starts of two engines, and steps of random requests of both."""
        starts: list[float] = []
        profiles = [self._new_profile(scheduler, spec, 2 * seed + i, starts, engines=2) for i in range(2)]
        rounds: list[list[tuple[float, Step]]] = []
        with no_garbage_collection():
            while len(rounds) < spec.rounds:
                for profile in profiles:
                    profile.go_on(1)
                    rounds += profile.take().rounds
        return ProfilingResult(rounds, {"start_up": float(np.mean(starts))})

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedFleet:
        """Send each request to the fleet at its arrival time; a profile in turns goes on by a step after each."""
        generations = generations_of(requests, self.vocabulary, scheduler.config.prefix_id_tokens)
        starts: list[float] = []
        if self._profiling.in_turns:
            if self._profile_in_turns is None:
                self._profile_in_turns = self._new_profile(scheduler, self._profiling, IN_TURNS_SEED, starts)
            else:
                self._start(scheduler, DirectClock(), starts)
        profile = self._profile_in_turns
        with no_garbage_collection():
            fleet = self._fleet(scheduler)
            fleet.run(generations, (lambda: None) if profile is None else lambda: profile.go_on(1))
        profiled = None
        if profile is not None:
            rounds = profile.take().rounds[::ROUNDS_KEPT]
            profiled = ProfilingResult(rounds, {"start_up": float(np.mean(starts))})
        spans = [span for engine in fleet.engines for span in step_spans(engine.steps, engine.followed)]
        return ReplayedFleet(generations, spans, profiled, fleet.replicas.log)

    def _fleet(self, scheduler: SchedulerPlan) -> Fleet:
        engines = [
            FleetEngine(i, lambda clock: self._make_engine(scheduler, clock), DirectClock())
            for i in range(self._spec.max_replicas)
        ]
        router = make_router(self._system.routing, random.Random(self._seed).randrange)
        return Fleet(engines, router, self._spec, self._system.replicas)

    def _new_profile(
        self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int, starts: list[float], engines: int = 1
    ) -> EngineProfile:
        """A profile of an engine whose start is timed, and which is one of several."""
        clock = DirectClock()
        engine, limits = self._start(scheduler, clock, starts), profiling_limits(scheduler, spec)
        limits = replace(limits, rounds=-(-limits.rounds // engines))
        return EngineProfile(engine, limits, self.vocabulary, seed, clock)

    def _start(self, scheduler: SchedulerPlan, clock: Clock, starts: list[float]) -> Engine:
        """An engine whose start is timed."""
        clock.start()
        engine = self._make_engine(scheduler, clock)
        starts.append(clock())
        return engine

    def _make_engine(self, scheduler: SchedulerPlan, clock: Clock) -> Engine:
        """Load weights, allocate the cache, and run a prompt that fills a step."""
        engine = Engine(self._source.load(), scheduler.config, scheduler.chunk_policy(), clock=clock)
        config, longest = scheduler.config, engine.executor.decoder.config.max_position_embeddings
        limits = config.max_num_batched_tokens, config.num_gpu_blocks * config.block_size, longest
        tokens = max(min(limits) - WARM_UP_OUTPUT, 1)
        engine.submit(
            make_generation(-1, [0] * tokens, WARM_UP_OUTPUT, sampling_params=GREEDY, block_size=engine.block_size)
        )
        while engine.step() is not None:
            pass
        return engine
