"""Charts of a single run: distributions, curves and timelines, with their legends below and values at the pointer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reports.pages.fields import SPAN_OF_LOG
from reports.pages.theme import GOAL, OUTAGE, series_colours

if TYPE_CHECKING:
    from bokeh.models import GlyphRenderer
    from bokeh.plotting import figure as Figure

HEIGHT = 300
FEW = 10
"""Values of a distribution, such as its percentiles alone, that are shown as points."""

TOOLS = "pan,wheel_zoom,box_zoom,reset,save"

Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        kind: `solid`, `dashed`, `dotted`, `points`, or `both`. low, high: ends of an interval at each point.
        names: what to say of each point.
    """

    label: str
    x: Numbers
    y: Numbers
    colour: str | None = None
    kind: str = "solid"
    low: Numbers = ()
    high: Numbers = ()
    names: Sequence[str] = ()


def canvas(title: str, *, height: int = HEIGHT, tools: str = TOOLS, **options: Any) -> Figure:
    """An empty chart that is as wide as there is room."""
    from bokeh.plotting import figure

    chart = figure(title=title, height=height, sizing_mode="stretch_width", tools=tools, min_border_right=12, **options)
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    chart.axis.axis_label_text_font_style = "normal"
    return chart


def curves(
    title: str,
    found: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = True,
    marks: Mapping[str, float] | None = None,
    **options: Any,
) -> Figure:
    """Lines and points over one axis; `marks`: places on the horizontal axis, by what they are."""
    kinds: dict[str, Any] = {"x_axis_type": "log" if log_x else "linear", "y_axis_type": "log" if log_y else "linear"}
    chart = canvas(title, **kinds, **options)
    chart.xaxis.axis_label, chart.yaxis.axis_label = x_label, y_label
    colours = series_colours(len(found))
    shown: dict[str, list[GlyphRenderer[Any]]] = {}
    for index, curve in enumerate(found):
        shown.setdefault(curve.label, []).extend(_draw(chart, curve, curve.colour or colours[index], x_label, y_label))
    for label, place in (marks or {}).items():
        shown[label] = [mark(chart, place, "height")]
    if from_zero and not log_y:
        chart.y_range.start = 0
    legend(chart, shown)
    plain_ticks(chart)
    return chart


def distribution(
    title: str, found: Mapping[str, tuple[Sequence[float], Sequence[float]]], label: str, goal: float | None = None,
    colours: Sequence[str] = (), of: str = "requests",
) -> Figure:  # fmt: skip
    """Cumulative distributions of one latency, as (values, shares) by name. A goal is a line.

    The axis is logarithmic where the slowest per cent would leave no room for the others.
    """
    positive = [values for values, _ in found.values() if values and min(values) > 0]
    log = any(values[-1] / values[len(values) // 2] > SPAN_OF_LOG for values in positive) and len(positive) == len(
        found
    )
    lines = [
        Curve(name, values, [100 * share for share in shares], colours[index] if colours else None,
              "both" if len(values) < FEW else "solid")
        for index, (name, (values, shares)) in enumerate(found.items())
    ]  # fmt: skip
    marks = {} if goal is None else {f"goal {goal:g} s": goal}
    return curves(title, lines, label, f"share of {of}, %", log_x=log, marks=marks, y_range=(0, 101))


def timeline(title: str, found: Sequence[Curve], y_label: str, outages: Sequence[Mapping[str, Any]] = (),
             **options: Any) -> Figure:  # fmt: skip
    """Series over time, seconds; outages (`engine`, `start`, `end`) are shaded."""
    from bokeh.models import BoxAnnotation

    chart = curves(title, found, "time, s", y_label, **options)
    end = max((each.x[-1] or 0.0 for each in found if each.x), default=0.0)
    for outage in outages:
        if outage["start"] < end:
            box = BoxAnnotation(
                left=outage["start"], right=min(outage["end"], end), fill_color=OUTAGE, fill_alpha=0.2,
                line_color=None, tags=["outage"],
            )  # fmt: skip
            chart.add_layout(box)
    return chart


def _draw(chart: Figure, curve: Curve, colour: str, x_label: str, y_label: str) -> list[GlyphRenderer[Any]]:
    from bokeh.models import ColumnDataSource, HoverTool

    pairs = [(x, y) for x, y in zip(curve.x, curve.y, strict=True)]
    nan = float("nan")
    data: dict[str, Any] = {
        "x": [nan if x is None else float(x) for x, _ in pairs],
        "y": [nan if y is None else float(y) for _, y in pairs],
    }
    tips = [("", curve.label), (x_label, "@x{0.[0000]}"), (y_label, "@y{0.[0000]}")]
    if curve.names:
        data["name"] = list(curve.names)
        tips.insert(1, ("", "@name"))
    drawn: list[GlyphRenderer[Any]] = []
    if curve.low:
        data |= {"low": [nan if each is None else float(each) for each in curve.low],
                 "high": [nan if each is None else float(each) for each in curve.high]}  # fmt: skip
        tips.append(("95 %", "@low{0.[0000]} to @high{0.[0000]}"))
    source = ColumnDataSource(data)
    if curve.low:
        drawn.append(chart.segment("x", "low", "x", "high", source=source, line_color=colour, line_width=3,
                                   line_alpha=0.45))  # fmt: skip
    if curve.kind != "points":
        dash = curve.kind if curve.kind in ("dashed", "dotted") else "solid"
        drawn.append(chart.line("x", "y", source=source, line_color=colour, line_width=2, line_dash=dash))
    if curve.kind in ("points", "both"):
        drawn.append(chart.scatter("x", "y", source=source, size=7, color=colour))
    mode = "mouse" if curve.kind in ("points", "both") else "vline"
    chart.add_tools(HoverTool(renderers=[drawn[-1]], tooltips=tips, mode=mode, visible=False))
    return drawn


def mark(chart: Figure, place: float, dimension: str) -> GlyphRenderer[Any]:
    """A dotted line across the chart at one value."""
    if dimension == "height":
        return chart.vspan(x=[place], line_color=GOAL, line_dash="dotted", line_width=2)
    return chart.hspan(y=[place], line_color=GOAL, line_dash="dotted", line_width=2)


def legend(chart: Figure, shown: Mapping[str, Sequence[GlyphRenderer[Any]]]) -> None:
    """A legend below the chart, a click on which hides a line; none for a single line without a name."""
    from bokeh.models import Legend

    items: list[Any] = [(label, list(drawn)) for label, drawn in shown.items() if label]
    if len(items) < 2 and not any(label.startswith("goal") for label in shown):
        return
    widest = max(len(label) for label, _ in items)
    columns = max(1, min(len(items), 3, 90 // (widest + 6)))
    chart.add_layout(
        Legend(items=items, click_policy="hide", ncols=columns, border_line_color=None, padding=2, margin=4,
               label_text_font_size="12px", inactive_fill_alpha=0.0),
        "below",
    )  # fmt: skip


def plain_ticks(chart: Figure) -> None:
    """Ticks as plain numbers, on logarithmic axes too."""
    from bokeh.models import BasicTickFormatter

    for axis in chart.axis:
        axis.formatter = BasicTickFormatter()
