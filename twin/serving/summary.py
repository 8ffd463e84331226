"""The summary of a run: metrics of its requests, engines, links and outages."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import spread, weighted_spread
from scenarios.measure import MeasureSpec
from scenarios.serving_workload import ClosedLoopSpec
from twin.serving.engine import Engine
from twin.serving.overload import describe_overload, first_overload
from twin.serving.plan import ServingPlan
from twin.serving.records import Columns, EngineLog
from twin.serving.simulation import Run

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def summarise(run: Run, measure: MeasureSpec) -> dict[str, Any]:
    """Latencies (seconds), throughput (tokens/s and requests/s of the whole system), and counts of the engines.

    TTFT and E2E count from `measure.start`; TPOT is (E2E - TTFT)/(n - 1) over answers of n > 1 tokens; ITL pools the
    gaps between successive tokens of all requests. Throughput counts the output of requests that ended in the measured
    window, over the window; without one, over the time from the first arrival to the last answer.
    """
    columns = run.columns
    counted = in_measured_window(columns, measure)
    of_requests = latencies(columns, measure)
    gaps, weights = pooled_gaps(run.logs, measure)
    output = _whole(columns.output_tokens)[counted]
    seconds = _span(columns, counted, measure)
    document: dict[str, Any] = {
        "requests": int(counted.sum()),
        "duration": seconds,
        "ttft": spread(of_requests["ttft"]),
        "tpot": spread(of_requests["tpot"]),
        "itl": weighted_spread(gaps, weights),
        "e2e": spread(of_requests["e2e"]),
        "output_tokens": int(output.sum()),
        "output_throughput": float(output.sum()) / seconds if seconds else None,
        "request_throughput": float(counted.sum()) / seconds if seconds else None,
    }
    if measure.slo:
        document["goodput"] = _goodput(columns, counted, measure) / seconds if seconds else None
    document |= _engine_counts(run)
    document["littles_law_error"] = _littles_law(run)
    return document


def engine_summaries(run: Run) -> list[dict[str, Any]]:
    """Steps, utilisation and counters of each engine."""
    return [
        {
            "name": log.name,
            "steps": len(log.ends),
            "busy": log.busy / run.end if run.end else 0.0,
            "load": log.running_seqs.area / (run.end * engine.max_num_seqs) if run.end else 0.0,
            "kv_used": _kv_used([engine], run.end),
            **asdict(engine.counters),
        }
        for log, engine in zip(run.logs, run.engines, strict=True)
    ]


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


def overload(run: Run, plan: ServingPlan) -> dict[str, Any] | None:
    """The first pool whose queue grows for as long as requests arrive (`overload_of`); None if there is none.

    Clients of a closed loop wait for their answers before they send again, so they cannot overload a system.
    """
    if isinstance(plan.scenario.workload.arrivals, ClosedLoopSpec):
        return None
    backlogs = {engine.name: engine.backlog for engine in run.engines}
    found = first_overload([{name: backlogs[name] for name in names} for names in plan.groups])
    return describe_overload(found, max(run.columns.arrival), run.end) if found else None


def latencies(columns: Columns, measure: MeasureSpec) -> dict[str, Floats]:
    """TTFT and E2E of each request that counts, and TPOT of those with several tokens, seconds."""
    counted = in_measured_window(columns, measure)
    found = {name: values[counted] for name, values in request_latencies(columns, measure).items()}
    return found | {"tpot": found["tpot"][~np.isnan(found["tpot"])]}


def request_latencies(columns: Columns, measure: MeasureSpec) -> dict[str, Floats]:
    """TTFT, TPOT and E2E of every request, seconds; the TPOT of an answer of fewer than two tokens is NaN."""
    start = _start_times(columns, measure)
    first, last = _floats(columns.first_token), _floats(columns.last_token)
    gaps = _whole(columns.output_tokens) - 1
    tpot = np.full(len(gaps), np.nan)
    np.divide(last - first, gaps, out=tpot, where=gaps > 0)
    return {"ttft": first - start, "tpot": tpot, "e2e": last - start}


def pooled_gaps(logs: list[EngineLog], measure: MeasureSpec) -> tuple[Floats, NDArray[np.int64]]:
    """Inter-token latencies, seconds, and the number of tokens that have each: a step's is that of all its decodes."""
    gaps: list[Floats] = [np.empty(0)]
    weights: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    for log in logs:
        ends = _floats(log.ends)
        if not len(ends):
            continue
        decodes = np.repeat(_whole(log.decodes), _whole(log.repeats))
        measured = ends >= measure.after
        if measure.before is not None:
            measured &= ends < measure.before
        gaps.append(np.diff(ends, prepend=ends[0])[measured])
        weights.append(decodes[measured])
        if len(log.odd_gaps):
            gaps.append(_floats(log.odd_gaps))
            weights.append(np.ones(len(log.odd_gaps), dtype=np.int64))
    return np.concatenate(gaps), np.concatenate(weights)


def _start_times(columns: Columns, measure: MeasureSpec) -> Floats:
    return _floats(columns.queued if measure.start == "queued" else columns.arrival)


def in_measured_window(columns: Columns, measure: MeasureSpec) -> Mask:
    """A mask of the requests that end in the measured window, which the summary counts."""
    last = _floats(columns.last_token)
    counted: Mask = last >= measure.after
    if measure.before is not None:
        counted &= last < measure.before
    return counted


def _goodput(columns: Columns, counted: Mask, measure: MeasureSpec) -> float:
    start = _start_times(columns, measure)[counted]
    first, last = _floats(columns.first_token)[counted], _floats(columns.last_token)[counted]
    tokens = np.maximum(_whole(columns.output_tokens)[counted] - 1, 1)
    times = {"ttft": first - start, "tpot": (last - first) / tokens, "e2e": last - start}
    good = np.ones(len(first), dtype=np.bool_)
    for name, limit in measure.slo.items():
        good &= times[name] <= limit
    return float(good.sum())


def _span(columns: Columns, counted: Mask, measure: MeasureSpec) -> float:
    if not counted.any():
        return 0.0
    last = float(_floats(columns.last_token).max())
    if measure.after or measure.before is not None:
        return min(measure.before or last, last) - measure.after
    return last - float(_floats(columns.arrival).min())


def _engine_counts(run: Run) -> dict[str, Any]:
    counters = [engine.counters for engine in run.engines]
    max_num_seqs = sum(engine.max_num_seqs for engine in run.engines)
    return {
        "prefill_tokens": sum(each.prefill_tokens for each in counters),
        "cached_tokens": sum(each.cached_tokens for each in counters),
        "preemptions": sum(each.preemptions for each in counters),
        "steps": sum(len(log.ends) for log in run.logs),
        "busy": sum(log.busy for log in run.logs) / (run.end * len(run.logs)) if run.end else 0.0,
        "load": sum(log.running_seqs.area for log in run.logs) / (run.end * max_num_seqs) if run.end else 0.0,
        "kv_used": _kv_used(run.engines, run.end),
    }


def _kv_used(engines: list[Engine], end: float) -> float | None:
    """Mean share of KV blocks in use over time; None for a run without detail."""
    if not end or not all(engine.log.detail for engine in engines):
        return None
    used = 0.0
    for engine in engines:
        states = engine.log.states()
        seconds = np.diff(np.minimum(states[:, 0], end), append=end)
        used += float(((engine.blocks - states[:, 3]) * seconds).sum())
    return used / (end * sum(engine.blocks for engine in engines))


def _littles_law(run: Run) -> float:
    """Relative difference between ∫ L dt, counted at arrivals and departures, and the sum of times in the system."""
    times = float((_floats(run.columns.last_token) - _floats(run.columns.arrival)).sum())
    return abs(run.population - times) / times if times else 0.0


def _floats(column: Any) -> Floats:
    return np.frombuffer(column, dtype=np.float64) if len(column) else np.empty(0)


def _whole(column: Any) -> NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.int64) if len(column) else np.empty(0, dtype=np.int64)
