"""The error of predictions for every measured row that aiconfigurator-core comes with: one table and one page.

    python -m benchmarks.error_board --package FOLDER [--out FOLDER] [--jobs N] [--write]

FOLDER is an installed `aiconfigurator_core`. Every row is predicted from data sheets, and corrected by the other rows
with everything of its configuration, its model, or its system left out in turn. `--out` gets board.json (goals, cells,
refusals, the ten worst) and the finished parts, from which an interrupted run continues. `--write` writes the page
docs/explanation/error-board.md and the summary that comes with the package.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.error_board import cells, page
from benchmarks.error_board.correction import Case, LeftOut, half_intervals, left_out
from benchmarks.error_board.prediction import Prediction, predict
from benchmarks.error_board.priors import PRIORS, UNFAMILIAR
from benchmarks.error_board.rows import Row, read_rows
from benchmarks.provenance import provenance
from latency_models.sources.roofline.spec import SUMMARY
from workloads.errors import BadInput

GROUPS = ("configuration", "model", "system")
KINDS = ("aggregated", "disaggregated", "assumed")
"""Rows of one engine, of prefill and decode workers, and of these where workers or drafts are not known."""
SOURCE = "systems/silicon_sample.csv of aiconfigurator-core 0.12, read by python -m benchmarks.error_board"


def predictions(rows: Sequence[Row], jobs: int) -> tuple[list[tuple[Row, Prediction]], dict[str, str]]:
    """The rows that can be predicted, and by id the reasons why the others cannot."""
    alike = list(dict.fromkeys(replace(row, id="") for row in rows))
    if jobs == 1:
        results = list(map(prediction_or_reason, alike))
    else:
        with ProcessPoolExecutor(jobs) as pool:
            results = list(pool.map(prediction_or_reason, alike, chunksize=8))
    by_row = dict(zip(alike, results, strict=True))
    predicted, reasons = [], {}
    for row in rows:
        result = by_row[replace(row, id="")]
        if isinstance(result, str):
            reasons[row.id] = result
        else:
            predicted.append((row, result))
    return predicted, reasons


def prediction_or_reason(row: Row) -> Prediction | str:
    """A row's prediction, or why there is none."""
    try:
        return predict(row)
    except BadInput as error:
        return f"{error.field} {error.value}: {error.expected}" if error.value else error.expected


def cases(predicted: Sequence[tuple[Row, Prediction]], quantity: str) -> list[Case]:
    """One case for each measurement."""
    unique = {row.measurement: (row, prediction) for row, prediction in reversed(predicted)}
    return [
        Case(row, prediction, plain(row, prediction, quantity) * -1, getattr(prediction, f"{quantity}_shares"))
        for row, prediction in unique.values()
    ]


def plain(row: Row, prediction: Prediction, quantity: str) -> float:
    """The logarithm of predicted over measured, by the source alone."""
    return math.log(getattr(prediction, quantity) / getattr(row, quantity))


def solve(task: tuple[str, str, list[Case], Path | None]) -> dict[str, list[tuple[float, float]]]:
    """Errors and half intervals of cases by what is left out; those that an earlier run has stored are read."""
    kind, quantity, known, folder = task
    prior = PRIORS[kind, quantity]
    apart = UNFAMILIAR.get((kind, quantity), prior)
    priors = (prior,) if apart is prior else (prior, apart)
    digest = hashlib.sha256(repr((*priors, known)).encode()).hexdigest()[:16]
    path = folder and folder / f"{kind}-{quantity}-{digest}.json"
    if path and path.exists():
        return dict(json.loads(path.read_text()))
    measured = np.array([case.error for case in known])
    solved = {}
    results: dict[str, LeftOut] = {}
    levels = {group: "sizes" if kind == "assumed" and group == "configuration" else group for group in GROUPS}
    for belief, some in ((prior, [levels["configuration"]]), (apart, ["model", "system"])):
        results |= left_out(known, belief, some)
    for group, level in levels.items():
        errors = results[level].mean - measured
        half = half_intervals(errors, results[level].deviation, [case.level(level) for case in known])
        solved[group] = list(zip(errors.tolist(), half.tolist(), strict=True))
    if path:
        path.write_text(json.dumps(solved))
    return solved


def judge(predicted: Sequence[tuple[Row, Prediction]], folder: Path | None, jobs: int) -> list[cells.Judged]:
    """Every predicted row beside its errors."""
    apart = [pair for pair in predicted if pair[0].prefill is not None]
    known = {
        "aggregated": [pair for pair in predicted if pair[0].prefill is None],
        "disaggregated": [pair for pair in apart if not pair[0].assumption],
        "assumed": apart,
    }
    tasks = [(kind, quantity, cases(known[kind], quantity), folder) for kind in KINDS for quantity in ("tpot", "ttft")]
    if jobs == 1:
        results = list(map(solve, tasks))
    else:
        with ProcessPoolExecutor(jobs) as pool:
            results = list(pool.map(solve, tasks))
    errors: dict[tuple[str, str], dict[Any, dict[str, tuple[float, float]]]] = {}
    for (kind, quantity, measured, _), solved in zip(tasks, results, strict=True):
        errors[kind, quantity] = {
            case.row.measurement: {group: solved[group][at] for group in GROUPS} for at, case in enumerate(measured)
        }
    return [
        cells.Judged(
            row,
            prediction,
            {quantity: plain(row, prediction, quantity) for quantity in ("tpot", "ttft")},
            {quantity: errors[kind_of(row), quantity][row.measurement] for quantity in ("tpot", "ttft")},
        )
        for row, prediction in predicted
    ]


def kind_of(row: Row) -> str:
    """Which of KINDS a row is of."""
    return "aggregated" if row.prefill is None else "assumed" if row.assumption else "disaggregated"


def board(rows: Sequence[Row], folder: Path | None, jobs: int) -> tuple[dict[str, Any], list[cells.Judged]]:
    """The document, and the judged rows."""
    predicted, reasons = predictions(rows, jobs)
    judged = judge(predicted, folder, jobs)
    document = {
        **provenance("twin.error-board/1"),
        "rows": len(rows),
        "measurements": len({row.measurement for row in rows}),
        "refused": cells.refused(reasons),
        **{kind: cells.judged_errors([one for one in judged if kind_of(one.row) == kind]) for kind in KINDS},
        "own cell": cells.in_own_cell([one for one in judged if one.row.prefill is None]),
        "shares": cells.shares([one for one in judged if one.row.prefill is None]),
        "worst": cells.worst(judged),
        "cells": cells.table(judged),
    }
    return document, judged


def main() -> int:
    """Predict, sum up, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        rows = read_rows(arguments.package)
        document, judged = board(rows, arguments.out, arguments.jobs)
    except BadInput as error:
        print(f"benchmarks.error_board: {error}", file=sys.stderr)
        return 2
    print(page.table(document))
    if arguments.out:
        (arguments.out / "board.json").write_text(json.dumps(document, indent=1) + "\n")
    if arguments.write:
        SUMMARY.write_text(page.summary(SOURCE, cells.summary_cells(judged)))
        page.write(document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
