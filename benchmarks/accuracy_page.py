"""The table and the figure of docs/accuracy.md on measured things that are predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.left_out import REACH, Comparison

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "accuracy.md"
FIGURE = ROOT / "docs" / "figures" / "predicted-over-measured.svg"
RESULTS = ROOT / "benchmarks" / "results" / "serving_accuracy.json"
BEGIN, END = "<!-- serving accuracy: generated -->", "<!-- serving accuracy: end -->"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table: error, and coverage and width of 90 % intervals."""
    lines = [
        "| what | values | fitted | bias, % | median, % | P90, % | coverage, % | width |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        numbers = (f"{100 * row[key]:{sign}.1f}" for key, sign in (("bias", "+"), ("median", ""), ("p90", "")))
        coverage = f"{100 * row['coverage']:.0f}"
        fitted = "yes" if row["fitted"] else "no"
        cells = (name, row["values"], fitted, *numbers, coverage, f"{row['width']:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def write(document: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Write the results, the part of the page between its two marks, and the figure."""
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(document['left_out'])}\n\n{END}{after}")
    draw(comparisons)


def draw(comparisons: Sequence[Comparison]) -> None:
    """Predicted over measured, one row of points for each comparison, with the mean 90 % interval behind them."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "accuracy"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(comparisons) + 1), layout="constrained")
    for place, comparison in enumerate(reversed(comparisons)):
        ratios = [
            predicted / measured for predicted, measured in zip(comparison.predicted, comparison.measured, strict=True)
        ]
        half = REACH * sum(comparison.deviation) / len(comparison.deviation)
        axes.fill_betweenx([place - 0.35, place + 0.35], 2.71828**-half, 2.71828**half, color="0.88", lw=0)
        heights = [place + 0.5 * (i / max(len(ratios) - 1, 1) - 0.5) for i in range(len(ratios))]
        axes.plot(ratios, heights, ".", ms=3, color="tab:blue" if comparison.fitted else "tab:orange", alpha=0.6,
                  rasterized=True)  # fmt: skip
    axes.axvline(1.0, color="0.4", lw=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 2.0)
    axes.set_xticks([0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(comparisons)), [comparison.name for comparison in reversed(comparisons)])
    axes.set_xlabel(
        "predicted over measured; blue: something of the configuration was fitted; grey: mean 90 % interval"
    )
    figure.savefig(FIGURE, metadata={"Date": None}, dpi=110)
