"""An autoscaled fleet of engines of one model in this process, profiled and replayed by direct execution.

An autoscaler really starts and drains engines. Each has a clock of its own, which counts the CPU time of its start and
of its steps and jumps over waits, as if it had a core alone. What comes first by these clocks happens first: an
arrival, a decision, the end of a start or of a step, simultaneous ones in the order of the twin
(`twin.environment.Priority`). Routing and decisions take no time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np

from latency_models.sources.engine_regression import Step
from latency_models.timed_runs import ProfiledRounds, ReplayedRun, Span
from live.clock import Clock, DirectClock
from live.device import no_garbage_collection
from live.engine import Engine
from live.generation import GREEDY, Generation, make_generation
from live.loaded_model import LoadedModel
from live.validation.backend import (
    IN_TURNS_SEED,
    Requests,
    WithoutDrafts,
    generations_of,
    model_source,
    profiling_limits,
    replayed_run,
    step_spans,
)
from live.validation.profiling import EngineProfile
from scenarios.engine import SchedulerPlan, make_router
from scenarios.overload import AutoscalingSpec
from scenarios.system import ColocatedSpec
from scenarios.validation import ProfilingSpec, ValidationScenario
from schedulers.replica_set import STOPPED, Replica, ReplicaSet
from schedulers.routing import Router
from workloads.request import Request

MakeEngine = Callable[[Clock], Engine]
"""Loads weights of its own and warms up, by a clock."""


class FleetEngine:
    """One engine of a fleet, as routers (`EngineState`) and scaling (`ScaledEngine`) see it.

    `due`: when its step ends, or it takes in the first request; infinite for an idle engine, seconds. `steps`,
    `followed`: as of `step_spans`.
    """

    failed = False
    speed = 1.0

    def __init__(self, index: int, make_engine: MakeEngine, clock: Clock) -> None:
        self.index = index
        self.name = f"engine-{index}"
        self.in_service = False
        self.due = inf
        self.steps: list[Span] = []
        self.followed: list[bool] = []
        self._make_engine = make_engine
        self._clock = clock
        self._engine: Engine | None = None
        self._inbox: list[Generation] = []
        self._computes = False
        self._num_running_seqs = 0
        self._busy = self._running = self._since = 0.0  # integrals up to the latest visit

    def start(self) -> float:
        """Build the engine; returns the seconds that this took."""
        self._clock.set(0.0)
        self._engine = engine = self._make_engine(self._clock)
        engine.keep_times = True
        engine.watch = lambda batch, begin, end: self.steps.append((batch, begin, end))
        return self._clock()

    def restart(self) -> None:
        """Do nothing: the engine is a new one."""

    def stop(self) -> None:
        """Free the engine's memory."""
        self._engine = None

    def submit(self, generation: Generation, now: float) -> None:
        """Hand in a request: the engine takes it in when its step ends, or now if it is idle."""
        self._inbox.append(generation)
        if self.due == inf:
            self.due = now

    def visit(self) -> list[Generation]:
        """End the step that is due, take in requests (`submitted`: when), and run the next; returns those finished."""
        self._busy, self._running, self._since = self.busy_until(self.due), self.running_until(self.due), self.due
        self._clock.set(self.due)
        result = self.engine.step() if self._computes else None
        for generation in self._inbox:
            self.engine.submit(generation)
        self._inbox = []
        launched = self.engine.launch()
        if result is not None:
            self.followed.append(launched)
        self._computes, self._num_running_seqs = launched, self.engine.core.num_running_seqs
        self.due = self._clock() if launched else inf
        return [] if result is None else result.finished

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "only engines that are up take requests"
        return self._engine

    @property
    def load(self) -> int:
        waiting = sum(entry.request.prompt_tokens + entry.request.max_tokens for entry in self._inbox)
        return self.engine.core.outstanding_tokens + waiting

    @property
    def max_num_seqs(self) -> int:
        return self.engine.core.config.max_num_seqs

    @property
    def num_running(self) -> int:
        return self.engine.core.num_running

    @property
    def num_waiting(self) -> int:
        return self.engine.core.num_waiting + len(self._inbox)

    @property
    def blocks(self) -> int:
        return self.engine.core.kv_cache.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.engine.core.kv_cache.num_free_blocks

    @property
    def is_idle(self) -> bool:
        return not (self.engine.sequences or self._inbox)

    def cached_prefix_tokens(self, request: Request) -> int:
        return self.engine.core.cached_prefix_tokens(request)

    def busy_until(self, now: float) -> float:
        return self._busy + (now - self._since if self._computes else 0.0)

    def running_until(self, now: float) -> float:
        return self._running + (now - self._since) * self._num_running_seqs


class Fleet:
    """Engines behind a router, as many as an autoscaler decides: of those that there may be, `initial` ones at first.

    `spec`: the section `system.autoscaling.engine`; what it states of a start, as the time of a node, is added to the
    measured time. `replicas`: states and log. `starts`: the measured seconds of each start, those at time 0 included.
    """

    def __init__(self, engines: Sequence[FleetEngine], router: Router, spec: AutoscalingSpec, initial: int) -> None:
        self.engines = list(engines)
        self.starts: list[float] = []
        self._router = router
        self._spec = spec
        self._ready: list[tuple[float, int, Replica]] = []  # starts under way: when each is over, its replica's life
        self._syncs = 1
        self._now = 0.0
        autoscaler = spec.build(lambda engines: {})
        self.replicas = ReplicaSet("engine", engines, initial, autoscaler, self._start, self._refresh)
        for engine in self.engines[:initial]:
            self.starts.append(engine.start())
        self._refresh()

    def run(self, generations: Sequence[Generation], after_step: Callable[[], None] = lambda: None) -> None:
        """Send each request at its arrival time until all are finished. `after_step`: called after each step."""
        arrivals, unfinished = deque(sorted(generations, key=lambda entry: entry.request.arrival)), len(generations)
        while unfinished:
            step = min(self.engines, key=lambda engine: (engine.due, engine.index))
            ready = min((time for time, _, _ in self._ready), default=inf)
            arrival, sync = arrivals[0].request.arrival if arrivals else inf, self._syncs * self._spec.sync_period
            self._now = min(arrival, ready, sync, step.due)
            if arrival == self._now:
                generation = arrivals.popleft()
                self._router.choose(generation.request, self._up).submit(generation, self._now)
            elif ready == self._now:
                self._put_up()
            elif sync == self._now:
                self._syncs += 1
                self.replicas.decide(self._now, 0, {})
                self._release()
            else:
                unfinished -= len(step.visit())
                self.replicas.stop_idle(self.replicas.replicas[step.index], self._now)
                self._release()
                after_step()

    def _start(self, replica: Replica) -> None:
        seconds = self.engines[replica.engine.index].start()
        self.starts.append(seconds)
        self._ready.append((self._now + self._spec.start_up.seconds + seconds, replica.life, replica))

    def _put_up(self) -> None:
        """End the starts that are over, except of engines that were to be stopped meanwhile."""
        over = [entry for entry in self._ready if entry[0] == self._now]
        self._ready = [entry for entry in self._ready if entry[0] > self._now]
        for _, life, replica in over:
            if replica.life == life:
                self.replicas.put_up(replica, self._now)

    def _release(self) -> None:
        """Free the memory of engines that have been stopped."""
        for engine, replica in zip(self.engines, self.replicas.replicas, strict=True):
            if replica.state == STOPPED:
                engine.stop()

    def _refresh(self) -> None:
        self._up = [engine for engine in self.engines if engine.in_service]


ROUNDS_KEPT = 4
"""Of the rounds that a profile in turns has, every fourth is fitted: they are as many as a fleet's steps."""

WARM_UP_OUTPUT = 4
"""Tokens that an engine computes before it is up, behind a prompt that fills a step."""


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

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        """Time the starts of two engines, and steps of random requests of both."""
        starts: list[float] = []
        profiles = [self._new_profile(scheduler, spec, 2 * seed + i, starts, engines=2) for i in range(2)]
        rounds: list[Sequence[tuple[float, Step]]] = []
        with no_garbage_collection():
            while len(rounds) < spec.rounds:
                for profile in profiles:
                    profile.go_on(1)
                    rounds += profile.take().rounds
        return ProfiledRounds(rounds, {"start_up": float(np.mean(starts))})

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedRun:
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
            profiled = ProfiledRounds(rounds, {"start_up": float(np.mean(starts))})
        spans = [span for engine in fleet.engines for span in step_spans(engine.steps, engine.followed)]
        run = replayed_run(generations, [generation.submitted for generation in generations], spans)
        return replace(run, profiled=profiled, scaling=fleet.replicas.log)

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
