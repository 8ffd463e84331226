"""Assembles the calibration file from measurements."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from latency_models.calibration import Component, Line, Provenance, to_line
from latency_models.fitting.estimator import CannotFit
from latency_models.fitting.linear import LinearLatency, fit_piecewise
from latency_models.sources.calibration_file import FittedPiece, MeasuredCalibration, Operation, StepOverhead
from latency_models.sources.ec_tables import LAYER_TYPES, LayerTables
from latency_models.sources.kernel_tables.attention import AttentionTimes
from latency_models.sources.kernel_tables.settings import KernelTableSettings
from latency_models.sources.kernel_tables.spec import KernelTableStepTime
from latency_models.sources.kernel_tables.tables import AttentionTable, Curve, HeldOut, KernelTables, TableSource
from latency_models.step_time import ANY_SEQUENCE
from live.calibration.operations import HEAD, ROW_BY_ROW, Point, via
from live.calibration.plan import MORE_ROUNDS, Journal, Plan
from live.device import device_name, versions
from live.graphs.capture_sizes import CaptureSizes
from reports.run_directory import commit
from schedulers.batches import Batch, Chunk

CLOSE, CLOSE_IN_NOISE = 0.05, 0.1
"""Limits of the median held-out error; the second applies if rounds differ by more than the first."""

ATTENTION = ("decode_attention", "prefill_attention", "mixed_attention")
LINES = {"decode_attention": ("context", "batch"), "prefill_attention": ("chunk", "before")}
"""The axis of an attention operation's fitted lines, and the axis that each line fixes."""

FFN = ("layernorm", "gate_up_proj", "act_fn", "down_proj")
ROW_TILE = {"cpu": 1, "cuda": 16}
MOST_DECODES, MOST_TOKENS = 256, 8192
"""Rows up to which captured steps are taken for decodes alone, and rows of the largest of all."""


@dataclass(frozen=True)
class Series:
    """Seconds of an operation's points (the statistic of their rounds), and the relative spread between rounds."""

    seconds: Mapping[Point, float]
    spread: float

    def pick(self, *, held_out: bool) -> dict[Point, float]:
        return {point: seconds for point, seconds in self.seconds.items() if point.held_out == held_out}


def gather(plan: Plan, journal: Journal) -> dict[str, Series]:
    points, _ = plan.points()
    by_operation: dict[str, dict[Point, list[float]]] = {}
    for point in [*points, *plan.messages()]:
        rounds = journal.rounds(point, plan.grid.rounds + MORE_ROUNDS)
        by_operation.setdefault(point.operation, {})[point] = rounds
    take: Callable[[list[float]], float] = min if plan.grid.statistic == "least" else statistics.median
    return {
        name: Series(
            {point: take(rounds) for point, rounds in series.items()},
            statistics.median(_spread(rounds[: plan.grid.rounds]) for rounds in series.values()),
        )
        for name, series in by_operation.items()
    }


def _spread(rounds: Sequence[float]) -> float:
    return (max(rounds) - min(rounds)) / statistics.median(rounds)


def assemble(plan: Plan, journal: Journal, name: str) -> MeasuredCalibration:
    """The calibration file of a complete journal."""
    series = gather(plan, journal)
    _, skipped = plan.points()
    provenance = Provenance(
        method="measured",
        source="twin calibrate run",
        device=device_name(plan.device),
        model=plan.model.name,
        date=datetime.datetime.now(datetime.UTC).date(),
        commit=commit(),
        versions=versions(),
        note=f"of {plan.grid.rounds} rounds' medians the {plan.grid.statistic}",
    )
    tables = _tables(series, provenance)
    attention = _attention_times(series)
    lines: dict[Component, Line] = {}
    for component, points in _component_points(plan, series).items():
        try:
            fitted = LinearLatency(relative=True).fit([x for x, _ in points], [t for _, t in points])
            lines[component] = to_line(fitted, component, "seconds")
        except CannotFit as error:
            skipped[f"line of {component}"] = f"no line: {error}"
    operations = {
        operation: _operation(operation, times, plan.device, attention)
        for operation, times in series.items()
        if operation != "whole_step"
    }
    return MeasuredCalibration(
        schema="twin.measured-calibration/1",
        name=name,
        provenance=provenance,
        model=plan.model,
        dtype=plan.dtype,
        row_tile=ROW_TILE[plan.device],
        capture_sizes=padded_rows() if plan.device == "cuda" else None,
        overhead=_overhead(plan, series, tables),
        operations=operations,
        skipped=skipped,
        ec=_layer_tables(plan, series, attention, provenance),
        tables=tables,
        **cast(dict[str, Any], lines),
    )


def padded_rows() -> list[int]:
    """Rows that linear layers compute in captured steps: those of decodes, and above of prompts."""
    sizes = CaptureSizes(MOST_DECODES, 1, MOST_TOKENS, 1)
    return [*sizes.decodes_alone, *(rows for rows in sizes.tokens if rows > MOST_DECODES)]


def _tables(series: Mapping[str, Series], provenance: Provenance) -> KernelTables | None:
    attention = _attention_table(series)
    if attention is None or any(name not in series for name in (*ROW_BY_ROW, *HEAD)):
        return None
    return KernelTables(
        schema="twin.step-time/1",
        kind="kernel-tables",
        provenance=TableSource(**provenance.model_dump()),
        dense={name: _curve(series[name], "tokens") for name in ROW_BY_ROW},
        per_sequence={name: _curve(series[name], "sequences") for name in HEAD},
        attention=attention,
    )


def _attention_table(series: Mapping[str, Series]) -> AttentionTable | None:
    if any(name not in series for name in ATTENTION):
        return None
    rows = []
    for name in ATTENTION:
        for point, seconds in series[name].pick(held_out=False).items():
            sizes = dict(point.sizes)
            history = max(sizes.get("context", 0) - 1, 0)  # tables do not count a decode's own token
            cells = (sizes.get("chunk", 0), sizes.get("before", 0), sizes.get("batch", 0), history)
            rows.append((*cells, _micro(seconds)))
    chunks, before, counts, histories, times = zip(*rows, strict=True)
    return AttentionTable(prefill_chunk=chunks, kv_prefill=before, n_decode=counts, kv_decode=histories, time_us=times)


def _attention_times(series: Mapping[str, Series]) -> AttentionTimes | None:
    """Attention of one layer in seconds, as a simulation predicts it; None if it was not measured."""
    table = _attention_table(series)
    return None if table is None else AttentionTimes(table, None, 1e-6, lambda axis, value: None)


def _curve(series: Series, axis: str) -> Curve:
    points = sorted((point[axis], _micro(seconds)) for point, seconds in series.pick(held_out=False).items())
    return Curve(rows=tuple(size for size, _ in points), time_us=tuple(time for _, time in points))


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 6)


def _operation(name: str, series: Series, device: str, attention: AttentionTimes | None) -> Operation:
    measured = series.pick(held_out=True)
    errors = [
        abs(guess - measured[point]) / measured[point] for point, guess in _predicted(name, series, attention).items()
    ]
    held_out = None
    if errors:
        middle, high = float(np.median(errors)), float(np.percentile(errors, 90))
        held_out = HeldOut(points=len(errors), median=middle, p90=high)
    limit = CLOSE_IN_NOISE if series.spread > CLOSE else CLOSE
    axis, fixed = _axes(name, series)
    return Operation(
        via="TCP sockets" if name == "round_trip" else via(name, device),
        axis=axis,
        points=len(series.seconds),
        repeat_spread=series.spread,
        held_out=held_out,
        allowed=limit,
        holds=held_out is None or held_out.median <= limit,
        lines=[] if name == "mixed_attention" else _lines(series.pick(held_out=False), axis, fixed),
    )


def _axes(name: str, series: Series) -> tuple[str, str]:
    """The axis of an operation's lines, and the axis that each line fixes ("" for none)."""
    return LINES.get(name, (next(iter(series.seconds)).sizes[0][0], ""))


def _predicted(name: str, series: Series, attention: AttentionTimes | None) -> dict[Point, float]:
    """The prediction for each held-out point: linear interpolation between the others."""
    held_out = series.pick(held_out=True)
    if name in ATTENTION:
        times = attention
        return {} if times is None else {point: attention_seconds(times, **dict(point.sizes)) for point in held_out}
    points = sorted((point.sizes[0][1], seconds) for point, seconds in series.pick(held_out=False).items())
    x, t = zip(*points, strict=True)
    return {point: float(np.interp(point.sizes[0][1], x, t)) for point in held_out}


def pictures(plan: Plan, journal: Journal, calibration: MeasuredCalibration) -> dict[str, dict[str, Any]]:
    """The contents of each operation's figure: `measured` and `held` rows of [x, seconds, fixed size or prediction]."""
    everything = gather(plan, journal)
    attention = _attention_times(everything)
    figures = {}
    for name, series in everything.items():
        if name == "whole_step":
            continue
        axis, fixed = _axes(name, series)
        fitted = series.pick(held_out=False).items()
        predicted = _predicted(name, series, attention)
        figures[name] = {
            "name": name,
            "fixed": fixed,
            "measured": [[point[axis], seconds, point[fixed] if fixed else 0] for point, seconds in fitted],
            "held": [[point[axis], series.seconds[point], guess] for point, guess in predicted.items()],
            **calibration.operations[name].model_dump(mode="json"),
        }
    return figures


def attention_seconds(
    attention: AttentionTimes, chunk: int = 0, before: int = 0, batch: int = 0, context: int = 0
) -> float:
    """Attention of one layer, as a simulation predicts it."""
    if not chunk:
        return attention.decode(batch, batch * context, context)
    return attention.mixed(step_batch(chunk, before, batch, context))


def step_batch(chunk: int, before: int, decodes: int, context: int) -> Batch:
    """A batch of these sizes for latency models, which do not look at its sequences."""
    chunks = [Chunk(ANY_SEQUENCE, chunk, before, last=True)] if chunk else []
    return Batch(chunks, [ANY_SEQUENCE] * decodes, decodes * context, context if decodes else 0)


def _lines(seconds_of: Mapping[Point, float], axis: str, fixed: str) -> list[FittedPiece]:
    groups: dict[int, list[tuple[int, float]]] = {}
    for point, seconds in seconds_of.items():
        groups.setdefault(point[fixed] if fixed else 0, []).append((point[axis], seconds))
    pieces = []
    for value, points in sorted(groups.items()):
        try:
            regimes = fit_piecewise([x for x, _ in points], [t for _, t in points])
        except CannotFit:
            continue  # fewer than three sizes
        pieces += [
            FittedPiece(
                where=f"{fixed} {value}" if fixed else "",
                range=(regime.low, regime.high),
                alpha=regime.alpha,
                beta=regime.beta,
                median_residual=regime.median_residual,
                worst_residual=regime.worst_residual,
                fit=None if regime.fit is None else to_line(regime.fit, "attention", "seconds").fit,
            )
            for regime in regimes
        ]
    return pieces


def _component_points(plan: Plan, series: Mapping[str, Series]) -> dict[Component, list[tuple[float, float]]]:
    """(size, seconds of a whole decode step) by component, for components that were measured."""
    layers, result = plan.model.layers, cast(dict[Component, list[tuple[float, float]]], {})
    if "decode_attention" in series:
        decodes = series["decode_attention"].seconds.items()
        result["attention"] = [(point["batch"] * point["context"], layers * seconds) for point, seconds in decodes]
    if all(name in series for name in FFN):
        totals: dict[float, float] = {}
        for name in FFN:
            for point, seconds in series[name].seconds.items():
                totals[point["tokens"]] = totals.get(point["tokens"], 0.0) + layers * seconds
        result["ffn"] = sorted(totals.items())
    if "round_trip" in series:
        messages = series["round_trip"].seconds.items()
        result["communication"] = [(point["requests"], layers * seconds) for point, seconds in messages]
    return result


def _overhead(plan: Plan, series: Mapping[str, Series], tables: KernelTables | None) -> StepOverhead:
    if tables is None or "whole_step" not in series:
        return StepOverhead(seconds=0.0)
    settings = KernelTableSettings(model=plan.model.name, row_tile=ROW_TILE[plan.device])
    bare = KernelTableStepTime(tables, settings, plan.model)
    steps = []
    for point, seconds in series["whole_step"].seconds.items():
        batch = step_batch(point["chunk"], 0, point["decodes"], point["context"])
        steps.append((dict(point.sizes), seconds, bare.seconds(batch)))
    beyond, factor = _beyond([bare for _, _, bare in steps], [seconds for _, seconds, _ in steps])
    checked_steps = [
        {**{name: float(size) for name, size in sizes.items()}, "seconds": seconds, "predicted": beyond + factor * sum_}
        for sizes, seconds, sum_ in steps
    ]
    error = statistics.median(abs(step["predicted"] / step["seconds"] - 1) for step in checked_steps)
    return StepOverhead(seconds=beyond, factor=factor, steps=checked_steps, median_error=error)


def _beyond(sums: list[float], measured: list[float]) -> tuple[float, float]:
    """(seconds, factor) of `StepOverhead`; seconds only, if too few steps were measured for both."""
    try:
        line = LinearLatency(relative=True, holdout=0).fit(sums, measured)
    except CannotFit:
        return max(0.0, statistics.median(t - x for x, t in zip(sums, measured, strict=True))), 1.0
    return line.beta_, line.alpha_


def _layer_tables(
    plan: Plan, series: Mapping[str, Series], attention: AttentionTimes | None, provenance: Provenance
) -> LayerTables | None:
    """ℓ_W4 and ℓ_EC. Non-linear operations are added to attention, over a fresh prompt of the same length."""
    quantised = [f"{form}/{kind}" for form in ("w4", "ec") for kind in LAYER_TYPES]
    if attention is None or any(name not in series for name in (*quantised, *ROW_BY_ROW)):
        return None
    tokens = list(plan.grid.quantised)

    def table(form: str) -> dict[Any, list[float]]:
        return {
            kind: [series[f"{form}/{kind}"].seconds[Point(f"{form}/{kind}", (("tokens", count),))] for count in tokens]
            for kind in LAYER_TYPES
        }

    element_wise = [_interpolated(series, tokens, name) for name in ("layernorm", "layernorm", "rotary_emb", "act_fn")]
    prompts = [attention_seconds(attention, count) for count in tokens]
    return LayerTables(
        schema="twin.ec-tables/1",
        layers=plan.model.layers,
        tokens=tokens,
        w4=table("w4"),
        ec=table("ec"),
        attention=[sum(times) for times in zip(prompts, *element_wise, strict=True)],
        source=f"twin calibrate run on {provenance.device}",
    )


def _interpolated(series: Mapping[str, Series], tokens: Sequence[int], name: str) -> list[float]:
    points = sorted((point["tokens"], seconds) for point, seconds in series[name].seconds.items())
    x, t = zip(*points, strict=True)
    return [float(np.interp(count, x, t)) for count in tokens]
