"""A report as an HTML page: its blocks, and the frame around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from reports.blocks import Block, Cell, Column, Document, Figure, Picture, Points, Report, Shown, Table, Text
from reports.explorer import bokeh_chart, choice, data_table, explorer, numbers_or_nan
from reports.fields import is_number
from reports.theme import asset

if TYPE_CHECKING:
    from bokeh.models import UIElement

    Part: TypeAlias = str | UIElement | Sequence[UIElement]
    """HTML, a Bokeh model, or several models that stand side by side where there is room."""


FEW = 3
"""Scenarios of a sweep that its page spells out."""


def whole_page(title: str, parts: Sequence[Part], manifest: Document) -> str:
    """The page as one text, with BokehJS as far as its models need it; at its end the run's origin."""
    models: list[UIElement] = []
    body = [_placed(part, models) for part in [*parts, *origin(manifest)]]
    return asset("page.html").format(
        title=escape(title),
        style=asset("page.css"),
        theme=asset("theme.js"),
        body="\n".join(body),
        scripts=_scripts(models) if models else "",
    )


def _placed(part: Part, models: list[UIElement]) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Sequence):
        return '<div class="charts">' + "\n".join(_placed(child, models) for child in part) + "</div>"
    models.append(part)
    return f'<div class="chart" id="chart-{len(models) - 1}"></div>'


def _scripts(models: Sequence[UIElement]) -> str:
    from bokeh.document import Document as Charts
    from bokeh.embed.bundle import bundle_for_objs_and_resources
    from bokeh.events import DocumentReady
    from bokeh.models import CustomJS
    from bokeh.resources import Resources

    charts = Charts(title="")
    with charts.models.freeze():  # else all models are looked for again with each
        for model in models:
            charts.add_root(model)
    for callback in charts.select({"type": CustomJS}):
        if "ready" in callback.tags:
            charts.js_on_event(DocumentReady, callback)
    names: dict[str, str] = {}
    document: Document = _renamed(charts.to_json(deferred=False), names)
    roots = {names[model.id]: f"chart-{index}" for index, model in enumerate(models)}
    text = json.dumps({"document": document, "roots": roots}, separators=(",", ":"), ensure_ascii=False)
    text = text.replace("</", "<\\/")
    resources = Resources(mode="inline", minified=True, log_level="warn")
    scripts = bundle_for_objs_and_resources([charts], resources).js_raw
    bokeh_js = "".join(f"<script>\n{script}\n</script>\n" for script in scripts)
    data = f'<script type="application/json" id="charts">{text}</script>'
    return f"{bokeh_js}{data}\n<script>\n{asset('charts.js')}</script>\n"


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """A document with its models numbered in order: Bokeh counts models over the life of a process."""
    if isinstance(value, list | tuple):
        return [_renamed(child, names) for child in value]
    if not isinstance(value, dict):
        return value
    copy = {key: _renamed(child, names) for key, child in value.items() if key != "id"}
    if "id" in value and (value.keys() == {"id"} or value.get("type") == "object"):
        return {**copy, "id": names.setdefault(value["id"], f"p{len(names)}")}
    return copy | ({"id": value["id"]} if "id" in value else {})


def origin(manifest: Document) -> list[str]:
    """The origin of a run: a table of its manifest, and its scenarios as YAML, folded."""
    if not manifest:
        return []
    import yaml

    hidden = ["scenarios", "scenario", "plan"]
    if manifest.get("status") == "running":  # a run draws its page before it is marked as complete
        hidden += ["complete", "status", "updated"]
    entries = {key: value for key, value in manifest.items() if key not in hidden}
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{_value(value)}</td></tr>" for key, value in entries.items())
    parts = ["<h2>How this was made</h2>", f'<div class="scroll"><table class="origin">{rows}</table></div>']
    for key in ("scenario", "plan", "scenarios"):
        if manifest.get(key):
            # Further configurations of a sweep say the same again but for what the table of points has.
            shortened, extent = manifest[key], ""
            if isinstance(shortened, list) and len(shortened) > FEW:
                shortened, extent = shortened[:FEW], f", the first {FEW} of {len(shortened)}"
            text = yaml.safe_dump(shortened, sort_keys=False, allow_unicode=True, width=110)
            parts.append(f"<details><summary>{escape(key + extent)}</summary><pre>{escape(text)}</pre></details>")
    return parts


def _value(value: object) -> str:
    if value is None or value == [] or value == {}:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{escape(str(key))} {_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(dict.fromkeys(_value(item) for item in value))  # points of a sweep often say the same
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(str(value))


ROW = 26
MOST_HEIGHT = 480


def sortable(headers: Sequence[str], rows: Sequence[Sequence[Any]], filtered: Sequence[str] = ()) -> UIElement:
    """A table of numbers and texts; a click on a header sorts. `filtered`: columns with a choice of values above."""
    from bokeh.layouts import column, row
    from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, CustomJS, Div, InlineStyleSheet

    sheet = InlineStyleSheet(css=asset("widgets.css"))
    data: dict[str, list[Any]] = {}
    columns = []
    for index, header in enumerate(headers):
        values = [cells[index] for cells in rows]
        numbers = is_number(value for value in values if value is not None)
        data[f"c{index}"] = numbers_or_nan(values) if numbers else [cell_text(value) for value in values]
        longest = 10 if numbers else max(map(len, data[f"c{index}"]), default=0)
        columns.append((f"c{index}", header, numbers, min(24 + 7 * max(len(header), longest), 560)))
    source = ColumnDataSource(data)
    view = CDSView(filter=BooleanFilter(booleans=[True] * len(rows)))
    table = data_table(source, view, columns, min(40 + ROW * max(len(rows), 1), MOST_HEIGHT))
    options = {f"c{headers.index(header)}": (header, data[f"c{headers.index(header)}"]) for header in filtered}
    choices = {
        key: choice(header, list(dict.fromkeys(map(str, values))), sheet, 230)
        for key, (header, values) in options.items() if len(set(map(str, values))) > 1
    }  # fmt: skip
    if not choices:
        return table
    note = Div(text=f"{len(rows)} rows.", stylesheets=[sheet])
    args = {"source": source, "view": view, "choices": choices, "told": note}
    callback = CustomJS(args=args, code=asset("filter.js"))
    for widget in choices.values():
        widget.js_on_change("value", callback)
    filters = row(*choices.values(), styles={"flex-wrap": "wrap"}, sizing_mode="stretch_width")
    return column(filters, note, table, sizing_mode="stretch_width")


def cell_text(value: object) -> str:
    """A value as text: numbers with five digits, lists with dashes between."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    return " – ".join(map(cell_text, value)) if isinstance(value, list) else str(value)


NUMBER = re.compile(r"([+-]?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*(%|ms|µs|s|x|×|GB|MB|tokens/s)?")

SMALLEST = 1e-3
"""Columns with smaller numbers stay text: sorted tables show four decimals."""

CHOICES = 12
"""Different texts up to which a column can be filtered."""

FIRST = {"answer": 10, "warning": 1}
"""Texts that begin a page, by style, and the number of them that are spelled out; the others are folded."""

LONG = 20
"""Rows of a table of details from which on it is folded."""


def page(report: Report, manifest: Document) -> str:
    """The whole page as one text. Answers and warnings, which a terminal may have at its end, come first."""
    parts: list[Part] = [f"<h1>{escape(report.title)}</h1>"]
    for style, count in FIRST.items():
        texts = [block for block in report if isinstance(block, Text) and block.style == style]
        parts += [part for block in texts[:count] for part in _text(block)]
        if len(texts) > count:
            more = "".join(part for block in texts[count:] for part in _text(block))
            parts.append(f"<details><summary>{len(texts) - count} more {style}s</summary>{more}</details>")
    for block in report:
        if not (isinstance(block, Text) and block.style in FIRST):
            parts += _parts(block)
    return whole_page(report.title, parts, manifest)


def _parts(block: Block) -> Iterator[Part]:
    match block:
        case Text():
            yield from _text(block)
        case Table():
            yield from _table(block)
        case Figure() if block.on_page:
            yield charts(block)
        case Picture():
            yield f"<figure>{block.svg[block.svg.index('<svg') :]}</figure>"  # without XML declaration and doctype
        case Points() if block.views:
            yield explorer(block.fields, block.views, block.names)


def _text(block: Text) -> Iterator[str]:
    lines = [escape(line) for line in block.text.strip().splitlines()]
    if not lines:
        return
    if block.style == "heading":
        yield f"<h2>{lines[0]}</h2>"
    elif block.style == "list":
        yield "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"
    else:
        kind = f' class="{block.style}"' if block.style else ""
        yield "".join(f"<p{kind}>{line}</p>" for line in lines)


def charts(figure: Figure) -> list[UIElement]:
    first, *following = figure.charts
    models = [bokeh_chart(first)]
    shared = {"x_range": models[0].x_range} if figure.shared else {}
    return [*models, *(bokeh_chart(chart, **shared) for chart in following)]


def _table(table: Table) -> Iterator[Part]:
    folds = table.detail and not table.sorts and len(table.rows) >= LONG
    title = escape(table.title)
    if folds:
        yield f"<details><summary>{title}</summary>"
    elif title:
        yield f"<h2>{title}</h2>"
    if table.sorts and table.rows:
        yield _sorted(table)
    elif table.rows:
        yield html_table(table.columns, [[_html(cell) for cell in row] for row in table.rows])
    if folds:
        yield "</details>"
    if table.caption:
        yield f'<p class="note">{escape(table.caption)}</p>'


def html_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table of HTML cells; the meaning of a column is shown where the pointer rests on its title."""
    helps = (f' title="{escape(column.help)}"' if column.help else "" for column in columns)
    titles = (escape(column.title.replace("\n", "")) for column in columns)
    head = "".join(f"<th{meaning}>{title}</th>" for meaning, title in zip(helps, titles, strict=True))
    lines = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{lines}</table></div>'


def _html(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell.strip())
    value, unit = cell.value, cell.unit
    ends: list[Any] = value if isinstance(value, list) else [value]
    if unit == "s" and all(isinstance(end, float) and abs(end) < 1 for end in ends):
        unit, value = "ms", [1e3 * end for end in ends] if isinstance(value, list) else 1e3 * ends[0]
    return html_cell(value) + (f" {unit}" if unit and value is not None else "")


def html_cell(value: object) -> str:
    """A value as HTML."""
    return escape(cell_text(value))


def _sorted(table: Table) -> Part:
    """A table to sort and filter. An empty first cell stands for the one above, which sorting would part it from."""
    headers: list[str] = []
    columns: list[Sequence[object]] = []
    for index, column in enumerate(table.columns):
        cells = [row[index] if index < len(row) else "" for row in table.rows]
        values, unit = _values(cells if index else _filled(cells))
        title = column.title.replace("\n", "")
        name = title if not unit or unit in title else f"{title}, {unit}".removeprefix(", ")
        headers.append(f"{name} " if name in headers else name)
        columns.append(values)
    filters = table.filters
    if filters is None:
        filters = [header for header, cells in zip(headers, columns, strict=True) if header and _is_choice(cells)]
    return sortable(headers, list(zip(*columns, strict=True)), filters)


def _values(cells: Sequence[Cell]) -> tuple[Sequence[object], str]:
    """The values of a column, numbers where all cells are numbers of one unit, and the unit."""
    if any(isinstance(cell, Shown) for cell in cells):
        return [cell.value if isinstance(cell, Shown) else cell for cell in cells], ""
    texts = [str(cell).strip() for cell in cells]
    matches = {text: NUMBER.fullmatch(text) for text in texts if text not in ("", "–")}
    numbers = {text: float(match[1].replace(",", "")) for text, match in matches.items() if match}
    units = {match[2] or "" for match in matches.values() if match}
    small = any(number and abs(number) < SMALLEST for number in numbers.values())
    if len(numbers) < len(matches) or len(units) != 1 or small:
        return cells, ""
    return [numbers.get(text) for text in texts], units.pop()


def _filled(cells: Sequence[Cell]) -> list[Cell]:
    filled: list[Cell] = []
    for cell in cells:
        filled.append(filled[-1] if filled and isinstance(cell, str) and not cell.strip() else cell)
    return filled


def _is_choice(column: Sequence[object]) -> bool:
    texts = {value for value in column if isinstance(value, str)}
    return 1 < len(texts) <= CHOICES and len(texts) < len(column) and len(column) > CHOICES / 2
