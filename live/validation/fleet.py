"""A fleet of engines in one process that an autoscaler really starts and drains, by direct execution.

Each engine has a clock of its own, which counts the CPU time of its start and of its steps and jumps over waits, as if
it had a core alone. What comes first by these clocks happens first: an arrival, a decision, the end of a start or of a
step, simultaneous ones in the order of the twin (`twin.environment.Priority`). Routing and decisions take no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from live.clock import Clock
from live.engine import Engine
from live.generation import Generation
from live.validation.replay import TimedStep
from scenarios.overload import AutoscalingSpec
from schedulers.batches import Batch
from schedulers.replica_set import STOPPED, Replica, ReplicaSet
from schedulers.routing import Router
from workloads.request import Request

MakeEngine = Callable[[Clock], Engine]
"""Loads weights of its own and warms up, by a clock."""


class FleetEngine:
    """One engine of a fleet, as routers (`EngineState`) and scaling (`ScaledEngine`) see it.

    Attributes:
        due: when its step ends, or when it takes in the first request; infinite for an idle engine, seconds.
        steps, followed: as of `ReplayResult`.
    """

    failed = False
    speed = 1.0

    def __init__(self, index: int, make_engine: MakeEngine, clock: Clock) -> None:
        self.index = index
        self.name = f"engine-{index}"
        self.in_service = False
        self.due = inf
        self.steps: list[TimedStep] = []
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
        engine.watch = self._watch
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

    def _watch(self, batch: Batch, begin: float, end: float) -> None:
        self.steps.append(TimedStep(batch, begin, end))

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
        """See `ScaledEngine`."""
        return self._busy + (now - self._since if self._computes else 0.0)

    def running_until(self, now: float) -> float:
        """See `ScaledEngine`."""
        return self._running + (now - self._since) * self._num_running_seqs


class Fleet:
    """Engines behind a router, as many as an autoscaler decides.

    Args:
        engines: as many as there may be, in order of their index. spec: the section `system.autoscaling.engine`; what
            it states of a start, as the time of a node, is added to the measured time. initial: engines that are up at
            first.

    Attributes:
        replicas: their states and the log. starts: the measured seconds of each start, those at time 0 included.
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
