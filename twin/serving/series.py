"""Curves of a run for the report: quantiles of the latencies, and who ran and waited over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.scenarios.serving import MeasureSpec
from twin.serving.run import Run
from twin.serving.summary import latencies, pooled_gaps

Floats = NDArray[np.float64]

POINTS = 101
"""Quantiles of a curve."""

SAMPLES = 400
"""Instants of a time series."""


def series(run: Run, measure: MeasureSpec) -> dict[str, Any]:
    """Quantiles of every latency, seconds, and time series at evenly spaced instants: `running` and `waiting` requests,
    and `kv_used`, the share of KV blocks in use, over all engines. Needs a run with detail.
    """
    found = latencies(run.columns, measure)
    gaps, weights = pooled_gaps(run.logs, measure)
    curves = {name: quantiles(values) for name, values in found.items()}
    curves["itl"] = _weighted_quantiles(gaps, weights)
    instants = np.linspace(0.0, run.end, SAMPLES)
    running, waiting, used = (np.zeros(SAMPLES) for _ in range(3))
    blocks = sum(engine.blocks for engine in run.engines)
    for engine in run.engines:
        changes = np.frombuffer(engine.log.changes, dtype=np.float64).reshape(-1, 4)
        if not len(changes):
            continue
        at = np.searchsorted(changes[:, 0], instants, side="right") - 1
        seen = at >= 0
        running += np.where(seen, changes[at, 1], 0)
        waiting += np.where(seen, changes[at, 2], 0)
        used += np.where(seen, engine.blocks - changes[at, 3], 0) / blocks
    return {
        "quantiles": {"p": np.linspace(0, 1, POINTS).tolist(), **curves},
        "time": instants.tolist(),
        "running": running.tolist(),
        "waiting": waiting.tolist(),
        "kv_used": used.tolist(),
    }


def quantiles(values: Floats) -> list[float] | None:
    """The curve of an empirical distribution; None of nothing."""
    return np.quantile(values, np.linspace(0, 1, POINTS)).tolist() if len(values) else None


def _weighted_quantiles(values: Floats, weights: NDArray[np.int64]) -> list[float] | None:
    kept = weights > 0
    values, weights = values[kept], weights[kept]
    if not len(values):
        return None
    order = np.argsort(values)
    through = np.cumsum(weights[order])
    ranks = np.linspace(0, 1, POINTS) * (through[-1] - 1)
    found: list[float] = values[order][np.searchsorted(through, ranks, side="right")].tolist()
    return found
