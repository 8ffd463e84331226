"""The board: errors by model, GPU, engine, layout and precision, what is refused, and the worst cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.error_board.prediction import SYSTEMS, Prediction
from benchmarks.error_board.rows import Row
from latency_models.deployment.models import load_model
from latency_models.sources.roofline.spec import family

WORST = 10
"""Cells that are listed as the worst."""

FEWEST = 4
"""Rows of a cell from which it may be among the worst."""

CAUSES: tuple[tuple[Callable[[Row], bool], str], ...] = (
    (
        lambda row: row.version == "1.3.0rc1",
        "two in flight take five times the TPOT of one, and more take less",
    ),
    (
        lambda row: row.in_flight >= 512 and row.engine == "vllm" and row.model == "gpt-oss-120b",
        "fewer requests run than are in flight, by a limit that is not stated",
    ),
    (
        lambda row: row.engine == "vllm" and row.model == "llama-3.1-8b" and row.system == "h200_sxm",
        "prompts from a prefix cache: more tokens a second than the peak",
    ),
    (
        lambda row: row.prefill is not None and bool(row.assumption),
        "workers or drafts are not stated",
    ),
    (
        lambda row: row.model in ("deepseek-v3", "kimi-k2", "glm-5") and row.engine in ("trtllm", "sglang"),
        "multi-token prediction is not stated",
    ),
    (
        lambda row: row.engine == "vllm" and row.model in ("qwen3-235b-a22b", "minimax-m2.5"),
        "block-wise FP8 experts on vLLM",
    ),
)  # fmt: skip
"""What is known of rows that lie far off, the first that holds."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One row beside its predictions: logarithms of predicted over measured TPOT and TTFT.

    Attributes:
        plain: by source roofline alone. left_out: corrected by the rows outside its configuration, model or system, by
            that name: the error, and half of its 90 % interval. All of `tpot` and `ttft`.
    """

    row: Row
    prediction: Prediction
    plain: Mapping[str, float]
    left_out: Mapping[str, Mapping[str, tuple[float, float]]]


def errors(values: Sequence[float], half: Sequence[float] | None = None) -> dict[str, float | int]:
    """Number, bias, median and P90 of relative errors; with half intervals, their coverage and mean width."""
    logs = np.array(values)
    relative = np.abs(np.expm1(logs))
    result: dict[str, float | int] = {
        "rows": len(logs),
        "bias": float(f"{np.expm1(np.median(logs)):.3g}"),
        "median": float(f"{np.median(relative):.3g}"),
        "p90": float(f"{np.quantile(relative, 0.9):.3g}"),
    }
    if half is not None:
        result["coverage"] = float(f"{np.mean(np.abs(logs) <= np.array(half)):.3g}")
        result["width"] = float(f"{2 * np.mean(half):.3g}")
    return result


def judged_errors(rows: Sequence[Judged]) -> dict[str, Any]:
    """Errors of TPOT and TTFT of some rows, by the source alone and with each thing left out."""
    summary: dict[str, Any] = {}
    for quantity in ("tpot", "ttft"):
        summary[quantity] = {"source alone": errors([row.plain[quantity] for row in rows])}
        for group in rows[0].left_out[quantity]:
            pairs = [row.left_out[quantity][group] for row in rows]
            summary[quantity][group] = errors([error for error, _ in pairs], [half for _, half in pairs])
    return summary


def grouped(rows: Sequence[Judged], key: Callable[[Row], tuple[str, ...]]) -> dict[tuple[str, ...], list[Judged]]:
    """Rows by a key, in its order."""
    groups: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    for judged in rows:
        groups[key(judged.row)].append(judged)
    return dict(sorted(groups.items()))


def cell_of(row: Row) -> tuple[str, ...]:
    """Model, GPU, engine, layout and precision."""
    return row.model, row.system, row.engine, row.layout, row.precision


def table(rows: Sequence[Judged]) -> list[dict[str, Any]]:
    """A line for each cell."""
    names = ("model", "system", "engine", "layout", "precision")
    return [
        {**dict(zip(names, key, strict=True)), **judged_errors(members)}
        for key, members in grouped(rows, cell_of).items()
    ]


def in_own_cell(rows: Sequence[Judged]) -> dict[str, float | int]:
    """Errors of TPOT by the source alone, in a plan's 90 % interval, by their cell's rows of other layouts."""
    errors_of, half = [], []
    for members in grouped(rows, lambda row: (row.model, row.system, row.engine, row.precision)).values():
        for judged in members:
            others = [other.plain["tpot"] for other in members if other.row.layout != judged.row.layout]
            if len(others) >= FEWEST:
                errors_of.append(judged.plain["tpot"])
                half.append(NINE_TENTHS * float(np.sqrt(np.mean(np.square(others)))))
    return errors(errors_of, half)


NINE_TENTHS = 1.645
"""Half of the interval that holds nine tenths of a normal distribution, in its deviations."""


def worst(rows: Sequence[Judged]) -> list[dict[str, Any]]:
    """The cells with the largest median error of TPOT, configuration left out, and the cause where it is known."""
    cells = [
        (errors([judged.left_out["tpot"]["configuration"][0] for judged in members]), key, members)
        for key, members in grouped(rows, cell_of).items()
        if len(members) >= FEWEST
    ]
    cells.sort(key=lambda cell: -cell[0]["median"])
    return [
        {"cell": " ".join(key), **summary, "cause": _cause([judged.row for judged in members])}
        for summary, key, members in cells[:WORST]
    ]


def _cause(rows: Sequence[Row]) -> str:
    """The first cause that holds for most of the rows; "not known" without one."""
    return next((text for holds, text in CAUSES if 2 * sum(map(holds, rows)) > len(rows)), "not known")


def refused(reasons: Mapping[str, str]) -> list[dict[str, Any]]:
    """Reasons with the number of rows that were refused for them."""
    return [{"reason": reason, "rows": rows} for reason, rows in Counter(reasons.values()).most_common()]


def summary_cells(rows: Sequence[Judged]) -> list[dict[str, Any]]:
    """The cells of the installed summary: aggregated rows by model, device and precision, and by family for others."""
    shared = [judged for judged in rows if judged.row.prefill is None]
    keys: list[Callable[[Row], tuple[str, ...]]] = [
        lambda row: (family(load_model(row.model)), row.model, row.engine, SYSTEMS[row.system], row.precision),
        lambda row: (family(load_model(row.model)), row.model, "", SYSTEMS[row.system], row.precision),
        lambda row: (family(load_model(row.model)), "", row.engine, SYSTEMS[row.system], row.precision),
        lambda row: (family(load_model(row.model)), "", "", SYSTEMS[row.system], row.precision),
    ]
    names = ("family", "model", "engine", "hardware", "precision")
    cells = []
    for key in keys:
        for values, members in grouped(shared, key).items():
            stated = {name: value for name, value in zip(names, values, strict=True) if value}
            logs = [judged.plain["tpot"] for judged in members]
            spread = float(f"{np.sqrt(np.mean(np.square(logs))):.3g}")
            cells.append({**stated, **errors(logs), "spread": spread})
    return cells


def shares(rows: Sequence[Judged]) -> dict[str, float]:
    """The mean share of each part in predicted TPOT."""
    totals: dict[str, float] = defaultdict(float)
    for judged in rows:
        for part, share in judged.prediction.tpot_shares.items():
            totals[part] += share / len(rows)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
