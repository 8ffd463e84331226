"""Charts of a page, and an explorer of points: made with Bokeh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reports.blocks import View
from reports.fields import Field
from reports.theme import GOAL, OUTAGE, SERIES, asset, scale, series_colours

if TYPE_CHECKING:
    from bokeh.models import Column, ColumnDataSource, DataTable, GlyphRenderer, Widget
    from bokeh.plotting import figure as Figure

    from reports.blocks import Chart, Curve


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

    data: dict[str, Any] = {"x": numbers_or_nan(curve.x), "y": numbers_or_nan(curve.y)}
    tips = [("", curve.label), (chart.x_label, "@x{0.[0000]}"), (chart.y_label, "@y{0.[0000]}")]
    if curve.names:
        data["name"] = list(curve.names)
        tips.insert(1, ("", "@name"))
    if curve.low:
        data |= {"low": numbers_or_nan(curve.low), "high": numbers_or_nan(curve.high)}
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


def numbers_or_nan(values: Sequence[Any]) -> list[float]:
    """Floats, NaN for None."""
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


EXPLORER_HEIGHT = 420
FEW = 12
"""A number with at most this many different values is filtered by these, one with more by its range."""

FILTERED = ("ttft.p99", "tpot.p99", "goodput_share")

PLACES = ("#x", "#y", "#colour")
"""Columns of the chart."""


def explorer(fields: Sequence[Field], views: Sequence[View], names: Sequence[str] = ()) -> Column:
    """A chart of points with a choice of axes, and a table of them; `names`: to point at, else settings."""
    from bokeh.layouts import column, row
    from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, CustomJS, Div, InlineStyleSheet

    sheet = InlineStyleSheet(css=asset("widgets.css"))
    count = len(fields[0].values)
    x, y = views[0].x, views[0].y
    source = ColumnDataSource(_columns(fields, names))
    for place, key in zip(PLACES, (x, y, x), strict=True):  # the script fills them; ranges must not begin with nothing
        source.data[place] = source.data[key if f"{key}#" not in source.data else f"{key}#"]
    view = CDSView(filter=BooleanFilter(booleans=[True] * count))
    chart = _chart(source, view, fields, bool(names))
    choices = _choices(fields, views, sheet)
    filters = _filters(fields, sheet)
    note = Div(text="", sizing_mode="stretch_width", stylesheets=[sheet])
    columns = [("#name", "", False, 220)] if names else []
    columns += [(field.key, field.label, field.is_number, _width(field)) for field in fields]
    table = data_table(source, view, columns, min(60 + 26 * count, 420))
    callback = CustomJS(
        args={
            "fields": {field.key: _facts(field) for field in fields},
            "source": source, "view": view, "chart": chart["figure"], "bar": chart["bar"], "front": chart["front"],
            "lines": chart["lines"], "goals": chart["goals"], "axes": chart["axes"], "choices": choices,
            "filters": filters, "told": note, "palette": scale(200), "categories": list(SERIES),
        },
        code=asset("explorer.js"),
        tags=["ready"],
    )  # fmt: skip
    for widget in choices.values():
        widget.js_on_change("active" if hasattr(widget, "active") else "value", callback)
    for widget in filters.values():
        widget.js_on_change("value", callback)
    wrap = {"flex-wrap": "wrap"}
    return column(
        row(*_view_buttons(fields, views, choices, sheet), styles=wrap, sizing_mode="stretch_width"),
        row(*choices.values(), styles=wrap, sizing_mode="stretch_width"),
        *([row(*filters.values(), styles=wrap, sizing_mode="stretch_width")] if filters else []),
        chart["figure"], note, table, sizing_mode="stretch_width",
    )  # fmt: skip


def _columns(fields: Sequence[Field], names: Sequence[str]) -> dict[str, Any]:
    """Columns of the source: numbers with NaN where there are none; of texts also their codes, under `key#`."""
    import numpy as np

    columns: dict[str, Any] = {"#name": list(names)} if names else {}
    for field in fields:
        if field.is_number:
            columns[field.key] = np.array(numbers_or_nan(field.values))
        else:
            codes = {text: index for index, text in enumerate(field.categories)}
            columns[field.key] = ["–" if value is None else str(value) for value in field.values]
            columns[f"{field.key}#"] = np.array([codes.get(str(value), math.nan) for value in field.values])
    return columns


def _facts(field: Field) -> dict[str, Any]:
    return {
        "label": field.label, "help": field.help, "better": field.better, "goal": field.goal,
        "setting": field.setting, "categories": None if field.is_number else field.categories,
        "decades": field.spans_decades,
    }  # fmt: skip


def _chart(source: ColumnDataSource, view: Any, fields: Sequence[Field], has_names: bool) -> dict[str, Any]:
    from bokeh.models import (
        BasicTicker,
        BasicTickFormatter,
        ColorBar,
        ColumnDataSource,
        FixedTicker,
        HoverTool,
        LinearColorMapper,
        LinearScale,
        LogScale,
        LogTicker,
        Span,
    )  # fmt: skip

    chart = canvas("", height=EXPLORER_HEIGHT, tools="pan,wheel_zoom,box_zoom,box_select,tap,reset,save")
    mapper = LinearColorMapper(palette=scale(200), low=0, high=1, nan_color=SERIES[0])
    lines = ColumnDataSource({"xs": [], "ys": [], "colour": []})
    chart.multi_line(
        "xs", "ys", source=lines, line_color={"field": "colour", "transform": mapper}, line_width=1.4, line_alpha=0.6
    )
    front = ColumnDataSource({"x": [], "y": []})
    chart.line("x", "y", source=front, line_color=GOAL, line_width=2, line_dash="dashed")
    points = chart.scatter(
        "#x", "#y", source=source, view=view, size=8, fill_color={"field": "#colour", "transform": mapper},
        line_color=None, fill_alpha=0.85, nonselection_fill_alpha=0.2,
    )  # fmt: skip
    tips = [("", "@{#name}")] if has_names else []
    tips += [(field.label, f"@{{{field.key}}}" + ("{0.[0000]}" if field.is_number else "")) for field in fields[:14]]
    chart.add_tools(HoverTool(renderers=[points], tooltips=tips))
    bar = ColorBar(
        color_mapper=mapper, width=12, padding=4, title_standoff=6, ticker=FixedTicker(ticks=[]), visible=False
    )
    chart.add_layout(bar, "right")
    goals = {
        "x": Span(dimension="height", line_color=GOAL, line_dash="dotted", line_width=2, visible=False),
        "y": Span(dimension="width", line_color=GOAL, line_dash="dotted", line_width=2, visible=False),
    }
    for span in goals.values():
        chart.add_layout(span)
    axes = {
        side: {
            "linear": LinearScale(), "log": LogScale(), "basic_ticker": BasicTicker(), "log_ticker": LogTicker(),
            "fixed": FixedTicker(ticks=[]),
        }
        for side in ("x", "y")
    }  # fmt: skip
    for axis in chart.axis:
        axis.formatter = BasicTickFormatter(precision="auto")
    return {"figure": chart, "bar": bar, "front": front, "lines": lines, "goals": goals, "axes": axes}


LOG_X, LOG_Y, LINES, PARETO = range(4)
"""The buttons of `scales`, in the order that the script knows."""


def _scales(fields: Sequence[Field], view: View) -> list[int]:
    by_key = {field.key: field for field in fields}
    flags = [
        flag for flag, key in ((LOG_X, view.x), (LOG_Y, view.y))
        if by_key[key].spans_decades and not by_key[key].setting
    ]  # fmt: skip
    return [*flags, LINES, *([PARETO] if view.pareto else [])]


def _choices(fields: Sequence[Field], views: Sequence[View], sheet: Any) -> dict[str, Any]:
    from bokeh.models import CheckboxButtonGroup, Select

    options: list[Any] = [(field.key, field.label) for field in fields]
    shared: dict[str, Any] = {"width": 210, "stylesheets": [sheet]}
    view = views[0]
    return {
        "x": Select(title="horizontal", value=view.x, options=options, **shared),
        "y": Select(title="vertical", value=view.y, options=options, **shared),
        "colour": Select(title="colour", value=view.colour, options=[("", "none"), *options], **shared),
        "scales": CheckboxButtonGroup(
            labels=["log horizontal", "log vertical", "lines", "Pareto"],
            active=_scales(fields, view), margin=(22, 5, 5, 5), stylesheets=[sheet],
        ),
    }  # fmt: skip


def _view_buttons(
    fields: Sequence[Field], views: Sequence[View], choices: Mapping[str, Any], sheet: Any
) -> list[Widget]:
    from bokeh.models import Button, CustomJS

    buttons: list[Widget] = []
    for view in views if len(views) > 1 else ():
        button = Button(label=view.label, stylesheets=[sheet])
        values = {"x": view.x, "y": view.y, "colour": view.colour}
        button.js_on_click(
            CustomJS(
                args={"choices": choices, "values": values, "active": _scales(fields, view)},
                code="for (const key of ['x', 'y', 'colour']) choices[key].value = values[key]\n"
                "choices.scales.active = active",
            )
        )
        buttons.append(button)
    return buttons


def _filters(fields: Sequence[Field], sheet: Any) -> dict[str, Widget]:
    from bokeh.models import RangeSlider

    filters: dict[str, Widget] = {}
    for field in fields:
        if not field.setting and (field.goal is None or field.key not in FILTERED):
            continue
        values = field.categories
        if not field.is_number or (field.setting and len(values) <= FEW):
            filters[field.key] = choice(field.label, values, sheet)
            continue
        numbers = [float(value) for value in field.values if value is not None]
        low, high = min(numbers), max(numbers)
        if low < high:
            filters[field.key] = RangeSlider(
                title=f"only {field.label}", start=low, end=high, value=(low, high), step=(high - low) / 200,
                width=210, stylesheets=[sheet], format="0.[0000]",
            )  # fmt: skip
    return filters


def choice(label: str, options: Sequence[str], sheet: Any, width: int = 210) -> Any:
    """A choice of several values; none: all."""
    from bokeh.models import MultiChoice

    return MultiChoice(title=f"only {label}", value=[], options=list(options), width=width, stylesheets=[sheet],
                       placeholder="all")  # fmt: skip


def data_table(
    source: ColumnDataSource, view: Any, columns: Sequence[tuple[str, str, bool, int]], height: int
) -> DataTable:
    """A table whose columns sort, of the rows that a view leaves; a column: field, title, is it of numbers?, width."""
    from bokeh.models import DataTable, InlineStyleSheet, NumberFormatter, StringFormatter, TableColumn

    table_columns = [
        TableColumn(
            field=field, title=title, width=width,
            formatter=NumberFormatter(format="0,0.[0000]", nan_format="–") if numbers else StringFormatter(),
        )
        for field, title, numbers, width in columns
    ]  # fmt: skip
    return DataTable(
        source=source, view=view, columns=table_columns, sizing_mode="stretch_width", height=height,
        index_position=None, autosize_mode="none", stylesheets=[InlineStyleSheet(css=asset("tables.css"))],
    )  # fmt: skip


def _width(field: Field) -> int:
    longest = 8 if field.is_number else max(map(len, field.categories), default=0)
    return min(30 + 7 * max(len(field.label), longest), 320)
