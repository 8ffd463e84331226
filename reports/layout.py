"""Parts that several reports have: sections, lists and tables, distributions, and series over time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any, TypeAlias

from reports.blocks import Block, Chart, Column, Curve, Document, Report, Table, Text
from reports.fields import SPAN_OF_LOG

Draw = Callable[[list[Any], Document], None]
"""Draws a document on the given axes, one for each panel."""

Section: TypeAlias = tuple[str, Block | Report]
"""A title, and what stands under it."""


def sections(titled: Iterable[Section]) -> Report:
    """Stack parts, each under its title."""
    blocks: list[Block] = []
    for title, body in titled:
        blocks += [Text(title, "heading"), *(body.blocks if isinstance(body, Report) else [body])]
    return Report("", blocks)


def bullets(lines: Iterable[str]) -> Text:
    """A list, an item a line."""
    return Text("\n".join(lines), "list")


def table(*titles: str) -> Table:
    """An empty table that sorts on a page: the first column is aligned to the left, figures to the right."""
    return Table([Column(title, left=index == 0) for index, title in enumerate(titles)], sorts=True)


MARKS = {"*": ("", "*"), "* ": (" ", "*"), "yes": ("no", "yes")}
"""Format specs of booleans, with what stands for false and true."""


class Cells(Formatter):
    """Format strings whose specs may begin with a factor (`{ttft:1e3 .1f}`) or `±`: an interval's middle and half
    width.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in MARKS:
            return MARKS[format_spec][bool(value)]
        factor, _, digits = format_spec.rpartition(" ")
        scale = float(factor) if factor else 1
        if digits.startswith("±"):
            low, high = value
            return f"{scale * (low + high) / 2:{digits[1:]}} ± {scale * (high - low) / 2:{digits[1:]}}"
        return format(scale * value if factor else value, digits)


def rows_table(titles: str, cells: str, rows: Iterable[Document]) -> Table:
    """A row for each document: `titles` and `cells` have a column each, separated by ` | `."""
    result, formatter = table(*titles.split(" | ")), Cells()
    for row in rows:
        result.add_row(*(formatter.vformat(cell, (), row) for cell in cells.split(" | ")))
    return result


def milliseconds(seconds: float) -> str:
    """Milliseconds with one digit, without the unit."""
    return f"{1e3 * seconds:.1f}"


def time_text(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def render(draw: Draw, document: Document, panels: int = 1, size: tuple[float, float] | None = None) -> str:
    """Draw panels side by side, as an SVG text. `size`: width and height, inches; None: by the number of panels."""
    from reports.svg import canvas, svg_text

    figure, axes = canvas(panels, panels, size or (4.2 * panels + 1, 3.8))
    draw(axes, document)
    return svg_text(figure)


FEW = 10
"""Values of a distribution, such as its percentiles alone, that are shown as points."""


def distribution(
    title: str, samples: Mapping[str, tuple[Sequence[float], Sequence[float]]], label: str, goal: float | None = None,
    colours: Sequence[str] = (), of: str = "requests",
) -> Chart:  # fmt: skip
    """Cumulative distributions of seconds, as (values, shares) by name, logarithmic for long tails, a goal a line."""
    positive = [values for values, _ in samples.values() if values and min(values) > 0]
    log = any(values[-1] / values[len(values) // 2] > SPAN_OF_LOG for values in positive)
    longest = max((values[-1] for values, _ in samples.values() if values), default=0.0)
    scale, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    curves = [
        Curve(name, [scale * value for value in values], [100 * share for share in shares],
              colours[index] if colours else None, "both" if len(values) < FEW else "solid")
        for index, (name, (values, shares)) in enumerate(samples.items())
    ]  # fmt: skip
    marks = {} if goal is None else {f"goal {goal:g} s": scale * goal}
    return Chart(
        title, curves, f"{label}, {unit}", f"share of {of}, %", log_x=log and len(positive) == len(samples),
        y_range=(0, 101), marks=marks,
    )  # fmt: skip


def timeline(title: str, curves: Sequence[Curve], y_label: str, outages: Sequence[Mapping[str, Any]] = (),
             **options: Any) -> Chart:  # fmt: skip
    """Series over time, seconds; outages (`engine`, `start`, `end`) are shaded as far as they lie within the run."""
    end = max((curve.x[-1] or 0.0 for curve in curves if curve.x), default=0.0)
    shaded = [(outage["start"], min(outage["end"], end)) for outage in outages if outage["start"] < end]
    title += ", outages shaded" if outages else ""
    return Chart(title, curves, "time, s", y_label, shaded=shaded, **options)
