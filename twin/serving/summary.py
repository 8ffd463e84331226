"""From what a run left to what is reported of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import spread, weighted_spread
from twin.scenarios.serving import MeasureSpec
from twin.serving.records import Columns, EngineLog
from twin.serving.run import Run

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


def summarise(run: Run, measure: MeasureSpec) -> dict[str, Any]:
    """Latencies (seconds), throughput (tokens/s and requests/s of the whole system), and what the engines did.

    TTFT and E2E count from `measure.start`; TPOT is (E2E - TTFT)/(n - 1) over answers of n > 1 tokens; ITL pools the
    gaps between successive tokens of all requests. Throughput counts the output of requests that ended in the measured
    window, over the window; without one, over the time from the first arrival to the last answer.
    """
    columns = run.columns
    counted = _counted(columns, measure)
    found = latencies(columns, measure)
    gaps, weights = pooled_gaps(run.logs, measure)
    output = _whole(columns.output_tokens)[counted]
    seconds = _span(columns, counted, measure)
    document: dict[str, Any] = {
        "requests": int(counted.sum()),
        "duration": seconds,
        "ttft": spread(found["ttft"]),
        "tpot": spread(found["tpot"]),
        "itl": weighted_spread(gaps, weights),
        "e2e": spread(found["e2e"]),
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
    """One entry an engine."""
    return [
        {
            "name": log.name,
            "steps": len(log.ends),
            "utilization": log.busy / run.end if run.end else 0.0,
            "prefill_tokens": sum(core.prefill_tokens for core in engine.cores),
            "cached_tokens": sum(core.cached_tokens for core in engine.cores),
            "preemptions": sum(core.preemptions for core in engine.cores),
        }
        for log, engine in zip(run.logs, run.engines, strict=True)
    ]


def link_summaries(run: Run) -> list[dict[str, Any]]:
    """One entry a link: its share of the time at work, bytes moved, and how long caches stood in line on average."""
    return [
        {
            "name": name,
            "utilization": link.busy / run.end if run.end else 0.0,
            "bytes": link.moved,
            "mean_wait": link.waited / link.sent if link.sent else 0.0,
        }
        for name, link in run.links.items()
    ]


def latencies(columns: Columns, measure: MeasureSpec) -> dict[str, Floats]:
    """TTFT and E2E of each request that counts, and TPOT of those with several tokens, seconds."""
    counted = _counted(columns, measure)
    start = _start_times(columns, measure)[counted]
    first, last = _floats(columns.first_token)[counted], _floats(columns.last_token)[counted]
    tokens = _whole(columns.output_tokens)[counted]
    several = tokens > 1
    tpot = (last[several] - first[several]) / (tokens[several] - 1)
    return {"ttft": first - start, "tpot": tpot, "e2e": last - start}


def pooled_gaps(logs: list[EngineLog], measure: MeasureSpec) -> tuple[Floats, NDArray[np.int64]]:
    """Inter-token latencies, seconds, and how many tokens each stands for: a step is one for each decode in it."""
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


def _counted(columns: Columns, measure: MeasureSpec) -> Mask:
    last = _floats(columns.last_token)
    counted: Mask = last >= measure.after
    if measure.before is not None:
        counted &= last < measure.before
    return counted


def _goodput(columns: Columns, counted: Mask, measure: MeasureSpec) -> float:
    start = _start_times(columns, measure)[counted]
    first, last = _floats(columns.first_token)[counted], _floats(columns.last_token)[counted]
    tokens = np.maximum(_whole(columns.output_tokens)[counted] - 1, 1)
    found = {"ttft": first - start, "tpot": (last - first) / tokens, "e2e": last - start}
    good = np.ones(len(first), dtype=np.bool_)
    for name, goal in measure.slo.items():
        good &= found[name] <= goal
    return float(good.sum())


def _span(columns: Columns, counted: Mask, measure: MeasureSpec) -> float:
    if not counted.any():
        return 0.0
    last = float(_floats(columns.last_token).max())
    if measure.after or measure.before is not None:
        return min(measure.before or last, last) - measure.after
    return last - float(_floats(columns.arrival).min())


def _engine_counts(run: Run) -> dict[str, Any]:
    cores = [core for engine in run.engines for core in engine.cores]
    return {
        "prefill_tokens": sum(core.prefill_tokens for core in cores),
        "cached_tokens": sum(core.cached_tokens for core in cores),
        "preemptions": sum(core.preemptions for core in cores),
        "steps": sum(len(log.ends) for log in run.logs),
        "utilization": sum(log.busy for log in run.logs) / (run.end * len(run.logs)) if run.end else 0.0,
    }


def _littles_law(run: Run) -> float:
    """How far ∫ L dt, counted as requests came and went, is from the sum of their times in the system, relatively."""
    times = float((_floats(run.columns.last_token) - _floats(run.columns.arrival)).sum())
    return abs(run.population - times) / times if times else 0.0


def _floats(column: Any) -> Floats:
    return np.frombuffer(column, dtype=np.float64) if len(column) else np.empty(0)


def _whole(column: Any) -> NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.int64) if len(column) else np.empty(0, dtype=np.int64)
