"""Errors and coverage of predictions where nothing of the predicted thing was fitted.

Closed-loop rows of aiconfigurator by configuration, model and system that were left out; logged engine steps by
workload. An interval of 90 % is the prediction times exp(± 1.645 σ), with σ from the unknowns of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.silicon import SiliconRow, choose_protocol
from benchmarks.silicon_regression import Library, SiliconRegression, levels
from latency_models.sources.vllm_step_log.spec import GRAPH_SIZES, StepRegression
from latency_models.sources.vllm_step_log.step_log import StepLog
from latency_models.step_time import draw_scores

REACH = 1.6449
"""Half a 90 % interval of a normal distribution, in deviations."""

DRAWS = 200

FITTED = 100
"""Steps that a fit has at least, of which twice the batch is asked."""


@dataclass
class Comparison:
    """Predicted and measured values, and the deviation of the logarithm that the model expects.

    Attributes:
        name: of what was predicted, and what was left out.
        fitted: whether anything of the configuration was fitted.
    """

    name: str
    fitted: bool
    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    deviation: list[float] = field(default_factory=list)

    def add(self, measured: float, predicted: float, deviation: float) -> None:
        """Add one value."""
        self.measured.append(measured)
        self.predicted.append(predicted)
        self.deviation.append(deviation)

    def summary(self) -> dict[str, Any]:
        """Errors, coverage, sharpness (mean width) and mean interval score (Gneiting and Raftery 2007) of logarithms.

        The score is the width, and 2/α = 20 times the distance by which a measured value is missed.
        """
        error = np.log(np.array(self.predicted) / np.array(self.measured))
        half = REACH * np.array(self.deviation)
        score = 2 * half + 20 * np.maximum(np.abs(error) - half, 0.0)
        relative = np.abs(np.expm1(error))
        return {
            "values": len(error),
            "fitted": self.fitted,
            "bias": float(np.expm1(np.median(error))),
            "median": float(np.median(relative)),
            "p90": float(np.quantile(relative, 0.9)),
            "coverage": float((np.abs(error) <= half).mean()),
            "width": float(2 * half.mean()),
            "score": float(score.mean()),
        }


LEFT_OUT: dict[str, Callable[[SiliconRow], str]] = {
    "configuration": lambda row: levels(row)[-1],
    "model": lambda row: row.model,
    "system": lambda row: row.tables,
}


def closed_loop_rows(rows: Sequence[SiliconRow], tables: Path) -> list[Comparison]:
    """TPOT of closed-loop rows: dev rows by a fit to calib rows, then every row by fits that leave its like out."""
    library = Library(tables)
    calib = [row for row in rows if row.split == "calib"]
    comparisons = [Comparison("TPOT of dev rows, configuration in calib", fitted=True)]
    model = SiliconRegression(tables=tables).fit(calib, library)
    for row in rows:
        if row.split == "dev" and levels(row)[-1] in model.groups_:
            comparisons[0].add(row.tpot, model.loop(row).tpot, model.deviation(row))
    first = Comparison("TTFT, configuration left out", fitted=False)
    for what, key in LEFT_OUT.items():
        every = Comparison(f"TPOT, {what} left out", fitted=False)
        experts = Comparison(f"TPOT of mixtures of experts, {what} left out", fitted=False)
        for name in sorted({key(row) for row in rows}):
            model = SiliconRegression(tables=tables).fit([row for row in rows if key(row) != name], library)
            for row in rows:
                if key(row) == name:
                    value = row.tpot, model.loop(row).tpot, model.deviation(row)
                    every.add(*value)
                    if row.expert_tensor_parallel * row.expert_parallel > 1 and "a22b" in row.model:
                        experts.add(*value)
            if what == "configuration":
                _first_tokens(first, model, rows, lambda row, name=name: levels(row)[-1] == name)  # type: ignore[misc]
        comparisons += [every, experts, first] if what == "configuration" else [every]
    return comparisons


def _first_tokens(
    comparison: Comparison, model: SiliconRegression, rows: Sequence[SiliconRow], left_out: Callable[[SiliconRow], bool]
) -> None:
    """TTFT of rows that are left out, by protocols that other configurations of their source tell.

    Rows of a source that has no others are not predicted: nothing says what its client does.
    """
    for source in sorted({row.source for row in rows if left_out(row)}):
        source_rows = [row for row in rows if row.source == source]
        fitted_rows = [row for row in source_rows if not left_out(row)]
        if not fitted_rows:
            continue
        protocol = choose_protocol(fitted_rows, [model.loop(row) for row in fitted_rows])
        for row in source_rows:
            if left_out(row):
                predicted = protocol.protocol.ttft(model.loop(row), row.concurrency, row.osl)
                # Rows of other configurations were fitted; this one's step times have their own error.
                comparison.add(row.ttft, predicted, math.hypot(protocol.half / REACH, model.deviation(row)))


def logged_steps(log: StepLog) -> list[Comparison]:
    """Logged steps by three fits: to other workloads, to the first tenth of each, and to small batches.

    The last are fits to the steps of at most as many rows as a CUDA graph has, for each size of graph, and are asked
    for those of at least twice as many.
    """
    across, after = Comparison("steps, workload left out", False), Comparison("steps after the first tenth", True)
    for workload in sorted(set(log.workload.tolist())):
        workload_steps = log.where(log.workload == workload)
        early, late = workload_steps.split(0.1)
        _compare(across, StepRegression().fit(log.where(log.workload != workload)), workload_steps.executed(), {})
        _compare(after, StepRegression().fit(early), late.executed(), {"workload": 0.0})
    twice, ran = Comparison("steps at twice the fitted batch", False), log.executed()
    rows = ran.decodes + ran.prompt_tokens
    for size in GRAPH_SIZES:
        small, large = rows <= size, rows >= 2 * size
        if small.sum() >= FITTED and large.any():
            _compare(twice, StepRegression(late=False).fit(ran.where(small)), ran.where(large), {})
    return [across, after, twice]


def pooled(comparisons: Sequence[Comparison]) -> Comparison:
    """All values of some comparisons, as one."""
    total = Comparison("all of it: the run, steps by workload, TPOT by configuration", fitted=False)
    for comparison in comparisons:
        for values in zip(comparison.measured, comparison.predicted, comparison.deviation, strict=True):
            total.add(*values)
    return total


def _compare(comparison: Comparison, model: StepRegression, ran: StepLog, protocols: Mapping[str, float]) -> None:
    """Add steps with the batches that ran. `protocols`: scores of what a fit to the same workload knows."""
    predicted, rng = model.predict(ran), np.random.default_rng(0)
    scores = [{**draw_scores(model.unknowns(), rng), **protocols} for _ in range(DRAWS)]
    draws = np.log([model.vary(score).predict(ran) for score in scores])
    deviation = np.hypot(draws.std(axis=0), model.scatter_)
    for values in zip(ran.seconds.tolist(), predicted.tolist(), deviation.tolist(), strict=True):
        comparison.add(*values)
