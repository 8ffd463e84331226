"""The summary of a run: metrics of its requests, engines, links and outages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reports.metrics import spread, weighted_spread, weighted_spread_of_parts
from scenarios.fields import MeasureSpec
from twin.serving.engine.engine_state import EngineState
from twin.serving.engine.links import CopyLink, Link, TierLinks
from twin.serving.engine.speculation import SimulatedSpeculation, describe_speculation
from twin.serving.records.engine_log import Backlog, Counters, EngineLog
from twin.serving.records.requests import Columns, PrefixReuse, SessionLog, ShedLog

if TYPE_CHECKING:
    from schedulers.replica_set import ScalingLog


@dataclass(frozen=True)
class EngineAtEnd:
    """An engine that another process has simulated, as reports read it; the attributes are those of `Engine`."""

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


Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def summarise(run: Run, measure: MeasureSpec) -> dict[str, Any]:
    """Latencies (seconds), throughput (tokens/s and requests/s of the whole system), and counts of the engines.

    TTFT and E2E count from `measure.start`; TPOT is (E2E - TTFT)/(n - 1) over answers of n > 1 tokens; ITL pools the
    gaps between successive tokens of all requests. Throughput counts the output of requests that ended in the measured
    window, over the window; without one, over the time from the first arrival to the last answer.
    """
    columns = run.columns
    in_window = within(columns.last_token, measure)
    output = np.asarray(columns.output_tokens)[in_window]
    seconds = _span(columns, in_window, measure)
    document: dict[str, Any] = {"requests": int(in_window.sum()), "duration": seconds}
    for name in ("ttft", "tpot", "itl", "e2e"):  # those of a million requests take 8 MB each, so there is one at a time
        if name == "itl":
            document[name] = _itl(run.logs, measure)
            continue
        values = request_latency(name, columns, measure)
        document[name] = spread(values[in_window & ~np.isnan(values)])
    document |= {
        "output_tokens": int(output.sum()),
        "output_throughput": float(output.sum()) / seconds if seconds else None,
        "request_throughput": float(in_window.sum()) / seconds if seconds else None,
    }
    if measure.slo:
        good = float((RequestLatencies(columns, measure).meet(measure.slo) & in_window).sum())
        document["goodput"] = good / seconds if seconds else None
        document["goodput_share"] = good / int(in_window.sum()) if in_window.any() else None
    if run.sessions is not None:
        document["sessions"] = summarise_sessions(run.sessions, measure)
    document |= _engine_counts(run)
    drafts = [engine.speculation.stats for engine in run.engines if engine.speculation is not None]
    if drafts:
        document["speculation"] = describe_speculation(drafts)
    if any(engine.tier_links is not None for engine in run.engines):
        document |= _tiers(run)
    if run.shed is not None:
        document["shed"] = _shed(run.shed, measure, document["requests"])
    if run.prefix_reuse is not None:
        document["prefix_cache"] = run.prefix_reuse.summary()
    document["littles_law_error"] = _littles_law(run)
    return document


def _shed(log: ShedLog, measure: MeasureSpec, finished: int) -> dict[str, Any]:
    """Requests that were shed for good in the measured window, their share of all, and those that were sent again."""
    shed = int(shed_in_window(log, measure).sum())
    return {"requests": shed, "share": shed / (shed + finished) if shed + finished else 0.0, "retries": log.retries}


def shed_in_window(log: ShedLog, measure: MeasureSpec) -> Mask:
    """A mask of the requests that were shed for good in the measured window."""
    return within(log.ended, measure)


def engine_summaries(run: Run) -> list[dict[str, Any]]:
    """Steps, utilisation while it is paid for, and counters of each engine."""
    return [
        {
            "name": log.name,
            "steps": log.num_steps,
            "busy": log.busy / seconds if seconds else 0.0,
            "load": log.running_seqs.area / (seconds * engine.max_num_seqs) if seconds else 0.0,
            "kv_used": _kv_used(run, [engine]),
            **{name: count for name, count in asdict(engine.counters).items() if count or name != "model_loads"},
            **(_stages(engine, log, run.end) if engine.stage_busy and run.end else {}),
        }
        for log, engine in zip(run.logs, run.engines, strict=True)
        for seconds in (run.engine_seconds(engine.name),)
    ]


def _stages(engine: AnyEngine, log: EngineLog, end: float) -> dict[str, Any]:
    """Shares of time that each stage of a pipeline computes, and its bubbles.

    Bubbles are the share of the stages' time that none computes, while a batch is in flight.
    """
    worked = log.busy * len(engine.stage_busy)
    return {
        "stages_busy": [busy / end for busy in engine.stage_busy],
        "bubbles": 1.0 - sum(engine.stage_busy) / worked if worked else 0.0,
    }


def link_summaries(run: Run) -> list[dict[str, Any]]:
    """Utilisation, bytes moved and mean waiting time (seconds) of each link."""
    return [
        {
            "name": name,
            "utilization": link.busy / run.end if run.end else 0.0,
            "bytes": link.moved,
            "mean_wait": link.waited / link.sent if link.sent else 0.0,
        }
        for name, link in run.links.items()
    ]


def outages(run: Run) -> list[dict[str, Any]]:
    """Engine, start and end (seconds) of each outage; overlapping outages of an engine are one."""
    return [{"engine": log.name, "start": start, "end": end} for log in run.logs for start, end in log.outages]


LATENCIES = ("ttft", "tpot", "e2e")
"""The latencies that each request has."""


def request_latency(name: str, columns: Columns, measure: MeasureSpec) -> Floats:
    """One of `LATENCIES` of every request, seconds; the TPOT of an answer of fewer than two tokens is NaN."""
    first, last = np.asarray(columns.first_token), np.asarray(columns.last_token)
    if name == "tpot":
        gaps = np.asarray(columns.output_tokens) - 1
        tpot = np.full(len(gaps), np.nan)
        np.divide(last - first, gaps, out=tpot, where=gaps > 0)
        return tpot
    start = np.asarray(columns.queued if measure.start == "queued" else columns.arrival)
    latency: Floats = (first if name == "ttft" else last) - start
    return latency


class RequestLatencies:
    """The latencies of every request of a run, by groups of requests.

    Attributes:
        values: TTFT, TPOT and E2E of every request, seconds; see `request_latency`.
        in_window: a mask of the requests that end in the measured window.
    """

    def __init__(self, columns: Columns, measure: MeasureSpec) -> None:
        self.values = {name: request_latency(name, columns, measure) for name in LATENCIES}
        self.in_window = within(columns.last_token, measure)

    def of(self, mask: Mask) -> dict[str, Floats]:
        """Each latency of a group, of the requests that have it."""
        groups = {name: values[mask] for name, values in self.values.items()}
        return {name: values[~np.isnan(values)] for name, values in groups.items()}

    def counted(self) -> dict[str, Floats]:
        """Each latency of the requests that count."""
        return self.of(self.in_window)

    def group(self, mask: Mask, default: dict[str, float | None] | None = None, **more: object) -> dict[str, Any]:
        """The number of requests of a group, `more`, and the spread of each latency; `default` where none has it."""
        spreads = {name: spread(values) or default for name, values in self.of(mask).items()}
        return {"requests": int(mask.sum()), **more, **spreads}

    def meet(self, goals: Mapping[Any, float]) -> Mask:
        """A mask of the requests that meet all goals, by latency; an answer of one token has no TPOT to miss."""
        good = np.ones(len(self.in_window), dtype=np.bool_)
        for name, limit in goals.items():
            good &= ~(self.values[name] > limit)
        return good


def pooled_gaps(logs: list[EngineLog], measure: MeasureSpec) -> tuple[Floats, NDArray[np.int64]]:
    """Inter-token latencies, seconds, and the number of tokens that have each: a step's is that of all its decodes."""
    parts = [(np.empty(0), np.empty(0, dtype=np.int64)), *_parts_of_gaps(logs, measure)]
    gaps, weights = zip(*parts, strict=True)
    return np.concatenate(gaps), np.concatenate(weights)


MANY_STEPS = 1 << 20
"""Steps from which on inter-token latencies are not brought together in memory."""


def _itl(logs: list[EngineLog], measure: MeasureSpec) -> dict[str, float] | None:
    """The spread of inter-token latencies."""
    if sum(log.num_steps for log in logs) < MANY_STEPS:
        return weighted_spread(*pooled_gaps(logs, measure))
    return weighted_spread_of_parts(lambda: _parts_of_gaps(logs, measure))


def _parts_of_gaps(logs: list[EngineLog], measure: MeasureSpec) -> Iterator[tuple[Floats, NDArray[np.int64]]]:
    """The gaps and weights that `pooled_gaps` brings together, in parts of one engine."""
    for log in [log for engine in logs for log in (*engine.micro_batches, engine)]:
        last = None
        for ends, decodes, repeats in () if log.micro_batches else log.step_parts(STEPS_OF_PART):
            weights = np.repeat(decodes.astype(np.int64), repeats)
            measured = within(ends, measure)
            yield np.diff(ends, prepend=ends[:1] if last is None else last)[measured], weights[measured]
            last = ends[-1:]
        if len(log.odd_gaps):
            yield np.asarray(log.odd_gaps), np.ones(len(log.odd_gaps), dtype=np.int64)


STEPS_OF_PART = 1 << 17
"""Steps from which on a part of `_parts_of_gaps` has no more."""


def within(times: Any, measure: MeasureSpec) -> Mask:
    """A mask of the times in the measured window: the summary counts requests that end there."""
    seconds = np.asarray(times)
    in_window: Mask = seconds >= measure.after
    return in_window if measure.before is None else in_window & (seconds < measure.before)


def _span(columns: Columns, in_window: Mask, measure: MeasureSpec) -> float:
    if not in_window.any():
        return 0.0
    last = float(np.asarray(columns.last_token).max())
    if measure.after or measure.before is not None:
        return min(measure.before or last, last) - measure.after
    return last - float(np.asarray(columns.arrival).min())


def _engine_counts(run: Run) -> dict[str, Any]:
    counters = [engine.counters for engine in run.engines]
    seconds, seats = run.end * len(run.logs), run.end * sum(engine.max_num_seqs for engine in run.engines)
    if run.scaling is not None:
        available = [(run.engine_seconds(engine.name), engine.max_num_seqs) for engine in run.engines]
        seconds, seats = (
            sum(duration for duration, _ in available),
            sum(duration * max_num_seqs for duration, max_num_seqs in available),
        )
    return {
        "prefill_tokens": sum(counts.prefill_tokens for counts in counters),
        "cached_tokens": sum(counts.cached_tokens for counts in counters),
        "preemptions": sum(counts.preemptions for counts in counters),
        "steps": sum(log.num_steps for log in run.logs),
        "busy": sum(log.busy for log in run.logs) / seconds if seconds else 0.0,
        "load": sum(log.running_seqs.area for log in run.logs) / seats if seats else 0.0,
        "kv_used": _kv_used(run, run.engines),
    }


def _tiers(run: Run) -> dict[str, Any]:
    """Copies to and from the tiers below devices, summed over engines."""
    every = [engine.tier_links for engine in run.engines if engine.tier_links is not None]
    prompts = sum(engine.counters.prefill_tokens + engine.counters.cached_tokens for engine in run.engines)
    tiers: dict[str, Any] = {}
    for name in dict.fromkeys(name for links in every for name in links.names):
        places = [(links, links.names.index(name)) for links in every if name in links.names]
        loads = {id(links.loads[i]): links.loads[i] for links, i in places}.values()  # a host's engines share theirs
        loaded = sum(links.loaded_nodes[i] * links.node_tokens for links, i in places)
        tiers[name] = {
            "loaded_tokens": loaded,
            "loaded_share": loaded / prompts if prompts else 0.0,
            "stored_tokens": sum(links.stored_nodes[i] * links.node_tokens for links, i in places),
            "loaded_bytes": sum(link.moved for link in loads),
            "stored_bytes": sum(links.stores[i].moved for links, i in places),
            "load_utilization": _mean_busy(list(loads), run.end),
            "store_utilization": _mean_busy([links.stores[i] for links, i in places], run.end),
        }
    seconds = np.concatenate([np.asarray(links.load_seconds) for links in every])
    return {"kv_tiers": tiers, "kv_load": spread(seconds)}


def _mean_busy(links: list[CopyLink], end: float) -> float:
    return sum(link.busy for link in links) / (end * len(links)) if end else 0.0


def _kv_used(run: Run, engines: Sequence[AnyEngine]) -> float | None:
    """Mean share of KV blocks in use over the time for which engines are paid; None for a run without detail."""
    if not run.end or not all(engine.log.detail for engine in engines):
        return None
    block_seconds = 0.0
    for engine in engines:
        states = engine.log.states()
        seconds = np.diff(np.minimum(states[:, 0], run.end), append=run.end)
        block_seconds += float(((engine.blocks - states[:, 3]) * seconds).sum())
    if run.scaling is None:
        return block_seconds / (run.end * sum(engine.blocks for engine in engines))
    available = sum(run.engine_seconds(engine.name) * engine.blocks for engine in engines)
    return block_seconds / available if available else 0.0


def _littles_law(run: Run) -> float:
    """Relative difference between ∫ L dt, counted at arrivals and departures, and the sum of times in the system."""
    times = float((np.asarray(run.columns.last_token) - np.asarray(run.columns.arrival)).sum())
    if run.shed is not None:
        times += float((np.asarray(run.shed.ended) - np.asarray(run.shed.arrival)).sum())
    return abs(run.population - times) / times if times else 0.0


def summarise_sessions(log: SessionLog, measure: MeasureSpec) -> dict[str, Any]:
    """Metrics of the sessions whose last answer is in the measured window; times in seconds.

    `time` is from a session's first request to its last answer, and `waits` the part of it without the pauses.
    `resent_tokens` are prompt tokens that the session had sent before or been answered with, `resent_share` their share
    of its prompt tokens, and `resent_cached` the share of them that the prefix cache supplied.
    """
    ends = np.array([record.end for record in log.finished])
    records = [log.finished[i] for i in np.flatnonzero(within(ends, measure))]
    count, prompts = len(records), sum(record.prompt_tokens for record in records)
    resent = sum(record.resent_tokens for record in records)
    return {
        "count": count,
        "turns": sum(record.turn for record in records) / count if count else None,
        "requests": sum(record.requests for record in records) / count if count else None,
        "time": spread(np.array([record.end - record.start for record in records])),
        "waited": spread(np.array([record.waited for record in records])),
        "resent_tokens": resent,
        "resent_share": resent / prompts if prompts else None,
        "resent_cached": sum(record.resent_cached_tokens for record in records) / resent if resent else None,
    }
