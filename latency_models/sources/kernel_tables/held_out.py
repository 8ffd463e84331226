"""Interpolation errors of a table: every other inner point is left out and predicted from its neighbours.

The remaining grid is twice as coarse as the one that predictions use, so these errors are upper bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from latency_models.interpolation import line_through
from latency_models.sources.kernel_tables.tables import HeldOut, KernelTables

Points = Mapping[tuple[float, ...], float]


def describe(tables: KernelTables) -> dict[str, Any]:
    """Ranges of the axes, held-out errors by table and axis, errors of the skew fit, and the provenance."""
    skew = tables.skew
    return {
        "provenance": tables.provenance.model_dump(mode="json", exclude_none=True),
        "tensor_parallel": tables.tensor_parallel,
        "ranges": tables.ranges or tables.measured_ranges(),
        "held_out": {name: error.model_dump() for name, error in (tables.held_out or held_out_errors(tables)).items()},
        "skew": None if skew is None else skew.model_dump(exclude={"pure", "mixed"}),
    }


def held_out_errors(tables: KernelTables) -> dict[str, HeldOut]:
    """Errors by table and axis. An axis without three points on any line has none.

    `dense` and `per_sequence` are judged by the sum of their layers, each counted once.
    """
    regimes = tables.attention.regimes
    errors = {
        "dense.tokens": _along(_sum_of_layers(tables.dense), 0),
        "per_sequence.sequences": _along(_sum_of_layers(tables.per_sequence), 0),
        "attention.decode.n_decode": _along(regimes.decode, 0),
        "attention.decode.kv_decode": _along(regimes.decode, 1),
        "attention.prefill.prefill_chunk": _along(regimes.prefill, 0),
        "attention.prefill.kv_prefill": _along(regimes.prefill, 1),
        "attention.mixed.prefill_chunk": _along(regimes.mixed, 0),
        "attention.mixed.kv_prefill": _along(regimes.mixed, 1),
        "attention.mixed.n_decode": _along(regimes.mixed, 2),
        "attention.mixed.kv_decode": _along(regimes.mixed, 3),
    }
    if tables.moe is not None:
        rows = zip(tables.moe.ep, tables.moe.tokens, tables.moe.activated_experts, tables.moe.time_us, strict=True)
        points: Points = {(ep, tokens, experts): time for ep, tokens, experts, time in rows}
        errors["moe.tokens"], errors["moe.activated_experts"] = _along(points, 1), _along(points, 2)
    return {name: error for name, error in errors.items() if error is not None}


def _sum_of_layers(curves: Mapping[str, Any]) -> Points:
    """The sum over layers, at the points where every layer was measured."""
    totals: dict[tuple[float, ...], float] = {}
    seen: dict[tuple[float, ...], int] = {}
    for curve in curves.values():
        for rows, time in curve.points():
            key = (float(rows),)
            totals[key] = totals.get(key, 0.0) + time
            seen[key] = seen.get(key, 0) + 1
    return {key: time for key, time in totals.items() if seen[key] == len(curves)}


def _along(points: Points, axis: int) -> HeldOut | None:
    """Errors of every other inner point on each line of points that differ on one axis only."""
    lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for key, time in points.items():
        lines.setdefault(key[:axis] + key[axis + 1 :], []).append((key[axis], time))
    errors = []
    for line in lines.values():
        line.sort()
        for i in range(1, len(line) - 1, 2):
            before, (x, time), after = line[i - 1 : i + 2]
            errors.append(abs(line_through(before, after, x) - time) / time)
    if not errors:
        return None
    return HeldOut(points=len(errors), median=float(np.median(errors)), p90=float(np.percentile(errors, 90)))
