"""Charts as Bokeh models, with their legends below and values at the pointer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports.pages.theme import GOAL, OUTAGE, series_colours

if TYPE_CHECKING:
    from bokeh.models import GlyphRenderer
    from bokeh.plotting import figure as Figure

    from reports.blocks import Chart, Curve, Numbers

HEIGHT = 300

TOOLS = "pan,wheel_zoom,box_zoom,reset,save"


def canvas(title: str, *, height: int = HEIGHT, tools: str = TOOLS, **options: Any) -> Figure:
    """An empty chart that is as wide as there is room."""
    from bokeh.plotting import figure

    chart = figure(title=title, height=height, sizing_mode="stretch_width", tools=tools, min_border_right=12, **options)
    chart.toolbar.logo = None
    chart.toolbar.autohide = True
    chart.axis.axis_label_text_font_style = "normal"
    return chart


def bokeh_chart(chart: Chart, **options: Any) -> Figure:
    """A chart as a Bokeh model; `options` of its figure, such as `x_range`."""
    from bokeh.models import BoxAnnotation

    if chart.y_range is not None:
        options["y_range"] = chart.y_range
    options |= {"x_axis_type": "log" if chart.log_x else "linear", "y_axis_type": "log" if chart.log_y else "linear"}
    figure = canvas(chart.title, height=chart.height, **options)
    figure.xaxis.axis_label = chart.x_label
    figure.yaxis.axis_label = chart.y_label
    renderers: dict[str, list[GlyphRenderer[Any]]] = {}
    for curve, colour in zip(chart.curves, series_colours(len(chart.curves)), strict=True):
        glyphs = _draw(figure, chart, curve, curve.colour or colour)
        renderers.setdefault(curve.label, []).extend(glyphs)
    for label, place in chart.marks.items():
        renderers[label] = [figure.vspan(x=[place], line_color=GOAL, line_dash="dotted", line_width=2)]
    if chart.from_zero and not chart.log_y:
        figure.y_range.start = 0
    for start, end in chart.shaded:
        box = BoxAnnotation(left=start, right=end, fill_color=OUTAGE, fill_alpha=0.2, line_color=None, tags=["outage"])
        figure.add_layout(box)
    legend(figure, renderers)
    plain_ticks(figure)
    return figure


def _draw(figure: Figure, chart: Chart, curve: Curve, colour: str) -> list[GlyphRenderer[Any]]:
    from bokeh.models import ColumnDataSource, HoverTool

    data: dict[str, Any] = {"x": _floats(curve.x), "y": _floats(curve.y)}
    tips = [("", curve.label), (chart.x_label, "@x{0.[0000]}"), (chart.y_label, "@y{0.[0000]}")]
    if curve.names:
        data["name"] = list(curve.names)
        tips.insert(1, ("", "@name"))
    if curve.low:
        data |= {"low": _floats(curve.low), "high": _floats(curve.high)}
        tips.append(("95 %", "@low{0.[0000]} to @high{0.[0000]}"))
    source = ColumnDataSource(data)
    glyphs: list[GlyphRenderer[Any]] = []
    if curve.low:
        glyphs.append(figure.segment("x", "low", "x", "high", source=source, line_color=colour, line_width=3,
                                     line_alpha=0.45))  # fmt: skip
    if curve.kind == "steps":
        glyphs.append(figure.step("x", "y", source=source, line_color=colour, line_width=2, mode="after"))
    elif curve.kind not in ("points", "crosses"):
        dash = curve.kind if curve.kind in ("dashed", "dotted") else "solid"
        glyphs.append(figure.line("x", "y", source=source, line_color=colour, line_width=2, line_dash=dash))
    if curve.kind in ("points", "crosses", "both"):
        marker = "x" if curve.kind == "crosses" else "circle"
        glyphs.append(figure.scatter("x", "y", source=source, size=7, color=colour, marker=marker))
    mode = "mouse" if curve.kind in ("points", "crosses", "both") else "vline"
    figure.add_tools(HoverTool(renderers=[glyphs[-1]], tooltips=tips, mode=mode, visible=False))
    return glyphs


def _floats(values: Numbers) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def legend(chart: Figure, renderers: Mapping[str, Sequence[GlyphRenderer[Any]]]) -> None:
    """A legend below the chart, a click on which hides a line; none for a single line without a name."""
    from bokeh.models import Legend

    items: list[Any] = [(label, list(glyphs)) for label, glyphs in renderers.items() if label]
    if len(items) < 2 and not any(label.startswith("goal") for label in renderers):
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
