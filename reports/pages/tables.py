"""Tables of a page whose columns sort and whose rows can be filtered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reports.pages.theme import TABLE, WIDGETS, asset

if TYPE_CHECKING:
    from bokeh.models import UIElement

ROW = 26
MOST_HEIGHT = 480


def sortable(headers: Sequence[str], rows: Sequence[Sequence[Any]], filtered: Sequence[str] = ()) -> UIElement:
    """A table of numbers and texts; a click on a header sorts. `filtered`: columns with a choice of values above."""
    from bokeh.layouts import column, row
    from bokeh.models import (
        BooleanFilter,
        CDSView,
        ColumnDataSource,
        CustomJS,
        DataTable,
        Div,
        InlineStyleSheet,
        MultiChoice,
        NumberFormatter,
        StringFormatter,
        TableColumn,
    )  # fmt: skip

    sheet = InlineStyleSheet(css=WIDGETS)
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in headers]
    data: dict[str, list[Any]] = {}
    table_columns = []
    for index, (header, values) in enumerate(zip(headers, columns, strict=True)):
        numbers = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool))
                      for value in values)  # fmt: skip
        data[f"c{index}"] = [(float("nan") if value is None else float(value)) if numbers else _text(value)
                             for value in values]  # fmt: skip
        formatter = NumberFormatter(format="0,0.[0000]", nan_format="–") if numbers else StringFormatter()
        longest = 10 if numbers else max(map(len, data[f"c{index}"]), default=0)
        width = min(24 + 7 * max(len(header), longest), 560)
        table_columns.append(TableColumn(field=f"c{index}", title=header, formatter=formatter, width=width))
    source = ColumnDataSource(data)
    view = CDSView(filter=BooleanFilter(booleans=[True] * len(rows)))
    table = DataTable(
        source=source, view=view, columns=table_columns, sizing_mode="stretch_width", index_position=None,
        height=min(40 + ROW * max(len(rows), 1), MOST_HEIGHT), autosize_mode="none",
        stylesheets=[InlineStyleSheet(css=TABLE)],
    )  # fmt: skip
    choices = {}
    for header in filtered:
        key = f"c{headers.index(header)}"
        options = list(dict.fromkeys(map(str, data[key])))
        if len(options) > 1:
            choices[key] = MultiChoice(
                title=f"only {header}", value=[], options=options, width=230, placeholder="all", stylesheets=[sheet]
            )
    if not choices:
        return table
    note = Div(text=f"{len(rows)} rows.", stylesheets=[sheet])
    args = {"source": source, "view": view, "choices": choices, "told": note}
    callback = CustomJS(args=args, code=asset("filter.js"))
    for choice in choices.values():
        choice.js_on_change("value", callback)
    filters = row(*choices.values(), styles={"flex-wrap": "wrap"}, sizing_mode="stretch_width")
    return column(filters, note, table, sizing_mode="stretch_width")


def _text(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, list):
        return " – ".join(map(_text, value))
    return str(value)
