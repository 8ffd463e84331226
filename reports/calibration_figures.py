"""One figure for each operation: measurements with fitted lines, and below the errors of lines and held-out points."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from reports.svg import svg_text

Document = dict[str, Any]

COLOURS = ("#1f5fa8", "#d1762b", "#2a8c5a", "#8a5fbf", "#d1495b", "#4a4a4a")
HELD = "#000000"


def operation_figure(picture: Document) -> str:
    """One operation as SVG text: `measured` and `held` as [x, seconds, …], its `lines`, and its errors."""
    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    FigureCanvasSVG(figure)
    times, errors = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    values = sorted({point[2] for point in picture["measured"]})
    colours = {value: COLOURS[i % len(COLOURS)] for i, value in enumerate(values)}
    for value in values:
        _series(times, errors, picture, value, colours[value])
    unseen = picture["held"]
    if unseen:
        times.plot([x for x, _, _ in unseen], [1e6 * t for _, t, _ in unseen], "x", color=HELD, ms=5, label="held out")
        errors.plot([x for x, _, _ in unseen], [100 * (guess / t - 1) for _, t, guess in unseen], "x", color=HELD, ms=5)
    times.set_ylabel("µs")
    times.set_xscale("symlog", base=2, linthresh=1)
    times.set_yscale("log")
    times.set_title(_title(picture), loc="left", fontsize=9)
    times.legend(fontsize=7, frameon=False)
    errors.axhline(0, color="#bbbbbb", lw=0.8)
    for limit in (-100 * picture["allowed"], 100 * picture["allowed"]):
        errors.axhline(limit, color="#bbbbbb", lw=0.8, ls=":")
    errors.set_ylabel("predicted − measured, %")
    errors.set_xlabel(picture["axis"])
    return svg_text(figure)


def _series(times: Axes, errors: Axes, picture: Document, value: int, colour: str) -> None:
    points = sorted(point for point in picture["measured"] if point[2] == value)
    where = f"{picture['fixed']} {value}" if picture["fixed"] else ""
    times.plot([x for x, _, _ in points], [1e6 * t for _, t, _ in points], "o", ms=3.5, color=colour,
               label=where or "measured")  # fmt: skip
    for line in picture["lines"]:
        if line["where"] != where:
            continue
        low, high = line["range"]
        inside = [(x, t) for x, t, _ in points if low <= x <= high]
        fitted = [line["alpha"] * x + line["beta"] for x, _ in inside]
        times.plot([x for x, _ in inside], [1e6 * t for t in fitted], "-", lw=1.2, color=colour)
        residuals = [100 * (guess / t - 1) for guess, (_, t) in zip(fitted, inside, strict=True)]
        errors.plot([x for x, _ in inside], residuals, "o", ms=3, mfc="none", color=colour)


def _title(picture: Document) -> str:
    held_out = picture.get("held_out")
    median = f"held-out median {100 * held_out['median']:.1f} %, " if held_out else ""
    limit = f"allowed {100 * picture['allowed']:.0f} %"
    return (
        f"{picture['name']} ({picture['via']}): {median}{limit}; repeats within {100 * picture['repeat_spread']:.1f} %"
    )
