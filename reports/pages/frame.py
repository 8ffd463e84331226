"""A self-contained page around HTML and Bokeh models: nothing is fetched, and equal contents give equal bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any, TypeAlias

from reports.pages.theme import asset

if TYPE_CHECKING:
    from bokeh.models import UIElement

    Part: TypeAlias = str | UIElement | Sequence[UIElement]
    """HTML, a Bokeh model, or several models that stand side by side where there is room."""

Document = dict[str, Any]

FEW = 3
"""Scenarios of a sweep that its page spells out."""

TEMPLATE = """<!doctype html>
<html lang="en" data-theme="light"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<script>{theme}</script>
</head>
<body>
<button id="theme" type="button" aria-label="light or dark">dark</button>
{body}
{scripts}</body></html>
"""

START = """<script type="application/json" id="charts">{document}</script>
<script>
(async () => {{
  const {{document: json, roots}} = JSON.parse(document.getElementById("charts").textContent)
  const item = {{docid: "charts", roots, root_ids: Object.keys(roots)}}
  await Bokeh.embed.embed_items({{charts: json}}, [item])
  for (const each of Bokeh.documents) paintCharts(each)
}})()
</script>
"""


def whole_page(title: str, parts: Sequence[Part], manifest: Document) -> str:
    """The page as one text, with BokehJS as far as its models need it; at its end the run's origin."""
    models: list[UIElement] = []
    body = [_placed(part, models) for part in [*parts, *origin(manifest)]]
    return TEMPLATE.format(
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

    charts = Charts(title="")
    with charts.models.freeze():  # else all models are looked for again with each
        for model in models:
            charts.add_root(model)
    _on_ready(charts)
    document: Document = dict(charts.to_json(deferred=False))
    names: dict[str, str] = {}
    document = _renamed(document, names)
    roots = {names[model.id]: f"chart-{index}" for index, model in enumerate(models)}
    text = json.dumps({"document": document, "roots": roots}, separators=(",", ":"), ensure_ascii=False)
    return bokeh_js(_components(document)) + START.format(document=text.replace("</", "<\\/"))


def _on_ready(charts: Any) -> None:
    from bokeh.events import DocumentReady
    from bokeh.models import CustomJS

    for callback in charts.select({"type": CustomJS}):
        if "ready" in callback.tags:
            charts.js_on_event(DocumentReady, callback)


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


def _types(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for child in value:
            yield from _types(child)
    elif isinstance(value, dict):
        if value.get("type") == "object":
            yield value["name"]
        for child in value.values():
            yield from _types(child)


def _components(document: Document) -> tuple[str, ...]:
    import bokeh.models.widgets as widgets
    from bokeh.models.widgets import tables

    names = set(_types(document))
    components = ["bokeh"]
    if any(hasattr(widgets, name) for name in names):
        components.append("bokeh-widgets")
    if any(hasattr(tables, name) for name in names if name.endswith(("Table", "Column", "Formatter"))):
        components.append("bokeh-tables")
    return tuple(components)


@cache
def bokeh_js(components: tuple[str, ...]) -> str:
    from bokeh.resources import Resources

    resources = Resources(mode="inline", components=list(components), minified=True, log_level="warn")
    return "".join(f"<script>\n{text}\n</script>\n" for text in resources.js_raw)


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
            shortened, extent = _first_few(manifest[key])
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


def _first_few(value: Any) -> tuple[Any, str]:
    """The first configurations of a sweep; the others say the same again but for what the table of points has."""
    if isinstance(value, list) and len(value) > FEW:
        return value[:FEW], f", the first {FEW} of {len(value)}"
    return value, ""
