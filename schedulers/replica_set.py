"""The engines of an autoscaled pool: which of them start, serve, drain and stop, as an autoscaler decides.

Engines are listed from the beginning, as many as a pool may have at most, but routers see only those that are up. The
life of one is: stopped, starting (it loads its weights and warms up), up, draining (it gets no more requests, and
finishes its own), stopped. It is paid for from the start to the stop. An outage takes an engine down in any of these
states: one that starts begins anew afterwards, one that drains is stopped at once.

The simulation and a live fleet drive the same set. It has no clock: times, seconds, come in with the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from schedulers.autoscaling import Autoscaler, EngineMetrics, Observation
from schedulers.routing import EngineState

STOPPED, STARTING, UP, DRAINING = "stopped", "starting", "up", "draining"


@dataclass
class ScalingLog:
    """The history of the engines of one pool that serve the same models.

    Attributes:
        changes: rows (time, up, starting, draining, failed): engines from `time` on. A failed engine that is paid for
            is counted as failed alone.
        paid: the times, seconds, from which and to which each engine was paid for, by name; None: to the end.
        started, stopped: how often an engine was started, and was to be stopped.
    """

    pool: str
    engines: list[str]
    changes: list[tuple[float, int, int, int, int]] = field(default_factory=list)
    paid: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)
    started: int = 0
    stopped: int = 0

    def engine_seconds(self, end: float) -> dict[str, float]:
        """The time up to `end` for which each engine is paid, seconds, by name."""
        return {name: self.seconds(name, end) for name in self.paid}

    def seconds(self, name: str, end: float) -> float:
        """The time up to `end` for which one engine is paid, seconds; 0.0 for one that was never started."""
        spans = self.paid.get(name, [])
        return sum((max(min(end if stop is None else stop, end) - start, 0.0) for start, stop in spans), 0.0)


class ScaledEngine(EngineState, Protocol):
    """The part of an engine that its pool's scaling sees. `in_service`: whether routers may choose it."""

    in_service: bool

    @property
    def name(self) -> str: ...

    @property
    def failed(self) -> bool: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    @property
    def is_idle(self) -> bool: ...

    def busy_until(self, now: float) -> float:
        """The time in which steps have run up to now, seconds."""

    def running_until(self, now: float) -> float:
        """The integral of running sequences up to now, in sequences times seconds."""

    def restart(self) -> None:
        """Have an empty cache, as it is up after its start."""


class Replica:
    """One engine and its state.

    `life`: counts changes of state, so that an event that was waited for in an earlier state can be told. `seen`: the
    time of the latest observation, or when it was up again. `busy`, `running`: integrals of these then.
    """

    def __init__(self, engine: ScaledEngine) -> None:
        self.engine = engine
        self.state = STOPPED
        self.since = self.seen = self.busy = self.running = 0.0
        self.life = 0

    def enter(self, state: str, now: float) -> None:
        self.state = state
        self.since = now
        self.life += 1

    def metrics(self, now: float) -> EngineMetrics | None:
        """The metrics since this was called last; None if that was now."""
        engine, seconds = self.engine, now - self.seen
        busy, running = self.busy, self.running
        self.seen = now
        self.busy = engine.busy_until(now)
        self.running = engine.running_until(now)
        if not seconds:
            return None
        return EngineMetrics(
            (self.busy - busy) / seconds,
            (self.running - running) / seconds / engine.max_num_seqs,
            1 - engine.free_blocks / engine.blocks,
            engine.num_running,
            engine.num_waiting,
        )


class ReplicaSet:
    """Scales engines by the decisions of an autoscaler: of those given, `initial` are up at first.

    `on_start`: called with a replica whose start begins; `put_up` is to be called when that is over, unless the
    replica's `life` took another turn. `on_change`: called when other engines are in service than before.
    """

    def __init__(
        self,
        pool: str,
        engines: Many[ScaledEngine],
        initial: int,
        autoscaler: Autoscaler,
        on_start: Callable[[Replica], object],
        on_change: Callable[[], None],
    ) -> None:
        self._autoscaler = autoscaler
        self._on_start = on_start
        self._on_change = on_change
        self._size = initial
        self.replicas = [Replica(engine) for engine in engines]
        self.log = ScalingLog(pool, [engine.name for engine in engines])
        for position, replica in enumerate(self.replicas):
            replica.engine.in_service = position < initial
            if position < initial:
                replica.enter(UP, 0.0)
                self.log.paid[replica.engine.name] = [(0.0, None)]
        self._note(0.0)

    def of(self, engine: ScaledEngine) -> Replica | None:
        """The replica of an engine; None for an engine of another set."""
        return next((replica for replica in self.replicas if replica.engine is engine), None)

    def decide(self, now: float, queued: int, latencies: Mapping[str, float]) -> None:
        """Have the number of engines decided, and start or drain as many; see `Observation` for the arguments."""
        size = self._autoscaler.decide(self._observe(now, queued, latencies))
        if size < self._size:
            self.log.stopped += self._size - size
        self._size = size
        self._adjust(now)

    def put_up(self, replica: Replica, now: float) -> None:
        """The start of an engine is over: it takes requests."""
        replica.engine.restart()
        replica.enter(UP, now)
        replica.metrics(now)  # from now on
        replica.engine.in_service = True
        self._on_change()
        self._note(now)

    def stop_idle(self, replica: Replica, now: float) -> None:
        """Stop an engine that drains and is idle."""
        if replica.state == DRAINING and replica.engine.is_idle:
            self._stop(replica, now)
            self._adjust(now)

    def note_outage(self, engine: ScaledEngine, now: float) -> None:
        """An engine has failed or recovered."""
        replica = self.of(engine)
        if replica is None:
            return
        if replica.state == STARTING:
            replica.life += 1
            if not engine.failed:
                self._on_start(replica)
        elif replica.state == DRAINING and engine.failed:
            self._stop(replica, now)
            self._adjust(now)
        elif not engine.failed:
            replica.metrics(now)  # from now on
        self._note(now)

    def _observe(self, now: float, queued: int, latencies: Mapping[str, float]) -> Observation:
        up = [replica for replica in self.replicas if replica.state == UP and not replica.engine.failed]
        metrics = [values for replica in up if (values := replica.metrics(now)) is not None]
        failed = sum(replica.engine.failed and replica.state in (UP, STARTING) for replica in self.replicas)
        draining = sum(replica.state == DRAINING for replica in self.replicas)
        return Observation(
            now, self._size, tuple(metrics), self._size - len(metrics) - failed, failed, draining, queued, latencies,
            self._autoscaler.min_replicas, self._autoscaler.max_replicas,
        )  # fmt: skip

    def _adjust(self, now: float) -> None:
        """Start or drain engines until there are as many as there should be, as far as some are free."""
        alive = [replica for replica in self.replicas if replica.state in (STARTING, UP)]
        free = sorted(
            (replica for replica in self.replicas if replica.state == STOPPED),
            key=lambda replica: replica.engine.failed,
        )
        for replica in free[: max(self._size - len(alive), 0)]:
            self._start(replica, now)
        if len(alive) > self._size:
            for replica in sorted(alive, key=_keep_first)[self._size :]:
                self._drain(replica, now)
            self._on_change()
        self._note(now)

    def _start(self, replica: Replica, now: float) -> None:
        replica.enter(STARTING, now)
        self.log.started += 1
        self.log.paid.setdefault(replica.engine.name, []).append((now, None))
        if not replica.engine.failed:
            self._on_start(replica)

    def _drain(self, replica: Replica, now: float) -> None:
        idle = replica.state == STARTING or replica.engine.failed
        replica.engine.in_service = False
        replica.enter(DRAINING, now)
        if idle or replica.engine.is_idle:
            self._stop(replica, now)

    def _stop(self, replica: Replica, now: float) -> None:
        spans = self.log.paid[replica.engine.name]
        replica.enter(STOPPED, now)
        spans[-1] = spans[-1][0], now

    def _note(self, now: float) -> None:
        sound = [replica.state for replica in self.replicas if not replica.engine.failed]
        failed = sum(replica.engine.failed and replica.state != STOPPED for replica in self.replicas)
        row = (float(now), sound.count(UP), sound.count(STARTING), sound.count(DRAINING), failed)
        changes = self.log.changes
        if changes and changes[-1][0] == row[0]:
            changes.pop()
        if not changes or changes[-1][1:] != row[1:]:
            changes.append(row)


def _keep_first(replica: Replica) -> tuple[bool, bool, float, int]:
    """The order in which engines are kept: those that are up, the oldest first; then those that start; then failed."""
    return replica.engine.failed, replica.state != UP, replica.since, replica.engine.index
