"""A report is a list of blocks, built once from a result's document, and shown by a renderer for each medium."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any, TypeAlias

from reports.fields import SPAN_OF_LOG

if TYPE_CHECKING:
    from reports.fields import Field


Document = dict[str, Any]
Numbers = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Shown:
    """A cell's text on a terminal, and its value, which a page shows with five digits and its unit."""

    text: str
    value: object
    unit: str = ""


Cell: TypeAlias = str | Shown
Row: TypeAlias = Sequence[Cell]


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        style: `answer`, `heading`, `note`, `warning`, `list` (an item a line), or "".
        detail: for a page, not for a terminal.
    """

    text: str
    style: str = ""
    detail: bool = False


@dataclass
class Column:
    """A column of a table.

    Attributes:
        rank: columns of the highest rank are left out first on a narrow terminal, from the right; rank 0 stays.
        help: its meaning, shown where the pointer rests.
    """

    title: str
    rank: int = 0
    left: bool = False
    help: str = ""


@dataclass
class Table:
    """Rows of cells under titles, without lines.

    Attributes:
        caption: a line below it.
        edge: a space before the first column.
        fits: columns are left out on a narrow terminal, and named below.
        sorts: on a page its columns sort and filter. filters: columns with a choice of values; None: those with few.
        detail: for a page, not for a terminal.
    """

    columns: list[Column]
    rows: list[Row] = field(default_factory=list)
    title: str = ""
    caption: str = ""
    edge: bool = False
    fits: bool = False
    sorts: bool = False
    filters: Sequence[str] | None = None
    detail: bool = False

    def add_row(self, *cells: Cell) -> None:
        """Add a row below the others."""
        self.rows.append(cells)


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        x: numbers, or names of categories where a chart is only drawn as SVG.
        kind: `solid`, `dashed`, `dotted`, `steps`, `points`, `crosses`, or `both`.
        low, high: ends of an interval at each point. names: of the points.
    """

    label: str
    x: Sequence[Any]
    y: Numbers
    colour: str | None = None
    kind: str = "solid"
    low: Numbers = ()
    high: Numbers = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """Curves over one axis.

    Attributes:
        marks: vertical lines by their labels. shaded: spans of the horizontal axis, such as outages.
        annotated: an SVG has the names of its points, which a page shows at the pointer.
    """

    title: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True
    y_range: tuple[float, float] | None = None
    marks: Mapping[str, float] = field(default_factory=dict)
    shaded: Sequence[tuple[float, float]] = ()
    height: int = 300
    annotated: bool = False


@dataclass(frozen=True)
class Figure:
    """Charts side by side.

    Attributes:
        name: of the SVG file; "" if there is none.
        columns: of an SVG. size: its width and height, inches.
        shared: charts of a page share the horizontal axis of the first.
        on_page: False for an SVG alone.
    """

    name: str
    charts: Sequence[Chart]
    title: str = ""
    columns: int = 1
    size: tuple[float, float] = (7.6, 5.2)
    shared: bool = False
    on_page: bool = True


@dataclass(frozen=True)
class Picture:
    """A figure that is SVG text already."""

    name: str
    svg: str


@dataclass(frozen=True)
class View:
    """A choice of axes: keys of fields, and whether the Pareto front is drawn."""

    label: str
    x: str
    y: str
    colour: str = ""
    pareto: bool = False


@dataclass(frozen=True)
class Points:
    """Points to compare: a page has an explorer, a terminal a table.

    Attributes:
        views: choices of axes; the first is shown at first; none: there is nothing to explore. names: of the points.
        table: for a terminal.
    """

    fields: Sequence[Field]
    views: Sequence[View]
    names: Sequence[str] = ()
    table: Table | None = None


Block: TypeAlias = Text | Table | Figure | Picture | Points


@dataclass(frozen=True)
class Report:
    """All blocks of a result, in the order of a terminal. `title`: of the page."""

    title: str
    blocks: Sequence[Block]

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)


def texts(lines: Iterable[str], style: str = "", *, detail: bool = False) -> list[Block]:
    """A paragraph for each line."""
    return [Text(line, style, detail) for line in lines]


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
    """Format strings whose specs may begin with a factor, then with `±` or `to` for an interval: `{ttft:1e3 to.1f}`.

    None is left out.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in MARKS:
            return MARKS[format_spec][bool(value)]
        if value is None:
            return ""
        factor, _, digits = format_spec.rpartition(" ")
        scale = float(factor) if factor else 1
        if digits.startswith("to"):
            return " to ".join(format(scale * end, digits[2:]) for end in value)
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
