"""The result of a run: its requests, and its engines and links at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from twin.serving.engine.engine_state import EngineState
from twin.serving.engine.links import Link, TierLinks
from twin.serving.engine.speculation import SimulatedSpeculation
from twin.serving.records.engine_log import Backlog, Counters, EngineLog
from twin.serving.records.requests import Columns, PrefixReuse, SessionLog, ShedLog

if TYPE_CHECKING:
    from schedulers.replica_set import ScalingLog


@dataclass(frozen=True)
class EngineAtEnd:
    """What a report reads of an engine that another process has simulated; the attributes are those of `Engine`."""

    name: str
    blocks: int
    max_num_seqs: int
    counters: Counters
    backlog: Backlog
    log: EngineLog
    speculation: SimulatedSpeculation | None = None
    tier_links: TierLinks | None = None
    stage_busy: list[float] = field(default_factory=list)


AnyEngine: TypeAlias = "EngineState | EngineAtEnd"


@dataclass(frozen=True)
class Run:
    """The result of a simulation.

    Attributes:
        columns: one entry a request. engines, links: in their states at the end.
        population: ∫ requests in the system dt, counted at arrivals and departures.
        outside: axes on which step times lay beyond their measurements; see `ServingPlan.outside`.
        sessions: the finished sessions; None for a workload without sessions.
        prefix_reuse: the prompts, if the scenario measures prefix caches.
        scaling: the engines over time of each group that is autoscaled.
        shed: the requests that were shed; None without admission control.
    """

    columns: Columns
    engines: Sequence[AnyEngine]
    links: dict[str, Link]
    population: float
    outside: dict[str, float]
    sessions: SessionLog | None = None
    prefix_reuse: PrefixReuse | None = None
    scaling: list[ScalingLog] | None = None
    shed: ShedLog | None = None

    @property
    def logs(self) -> list[EngineLog]:
        return [engine.log for engine in self.engines]

    @cached_property
    def end(self) -> float:
        """When the last answer was complete and the last step had ended, seconds."""
        last_steps = [log.end_of(-1) for log in self.logs if log.num_steps]
        return max([max(self.columns.last_token, default=0.0), *last_steps])

    def engine_seconds(self, name: str) -> float:
        """The time for which an engine was there and is paid for, seconds: all of it, unless it is autoscaled."""
        for log in self.scaling or ():
            if name in log.engines:
                return log.seconds(name, self.end)
        return self.end

    def request_table(self) -> dict[str, Any]:
        """All columns of the requests by name, in the order in which they finished. Needs detail."""
        table = self.columns.table()
        return table if self.sessions is None else table | self.sessions.columns_of(table["id"])
