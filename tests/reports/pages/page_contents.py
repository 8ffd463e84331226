"""The contents of a page: its tables, what a browser would load, and the models of its charts."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import numpy as np


class Tables(HTMLParser):
    """Rows of cells, and whatever a browser would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], "tags that are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [
            value for name, value in attrs if name in ("src", "href") and value and not value.startswith(("#", "data:"))
        ]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value for name, value in attrs if name == "src" and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if any(tag in ("td", "th") for tag in self.open):
            self.rows[-1][-1] += data


def models(page: str, name: str) -> list[dict[str, Any]]:
    """The attributes of all models of one type in the page's charts."""
    script = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.S)
    return (
        []
        if script is None
        else [item["attributes"] for item in _objects(json.loads(script[1])) if item["name"] == name]
    )


def columns(page: str) -> list[dict[str, list[Any]]]:
    """The columns of all data sources of the page's charts."""
    return [
        {name: _values(values) for name, values in source["data"]["entries"]}
        for source in models(page, "ColumnDataSource")
    ]


def titles(page: str) -> list[str]:
    """The titles of the page's charts."""
    return [item["text"] for item in models(page, "Title") if item.get("text")]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for child in value:
            yield from _objects(child)
    elif isinstance(value, dict):
        if value.get("type") == "object":
            yield {"attributes": {}, **value}
        for child in value.values():
            yield from _objects(child)


def _values(column: Any) -> list[Any]:
    """A column: a list, or compressed numbers."""
    if isinstance(column, dict):
        array = np.frombuffer(gzip.decompress(base64.b64decode(column["array"]["data"])), dtype=column["dtype"])
        return array.tolist()  # type: ignore[no-any-return]
    return list(column)
