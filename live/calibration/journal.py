"""The measurements of a calibration so far, on disk, so that the same command continues a run that was killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Lines of JSON beside the calibration: first what is measured, on what, then a line for each measurement.

    A line that a kill cut short is dropped. A journal of something else is replaced.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}
        lines = [] if fresh else list(_lines(path))
        if lines and lines[0] == about:
            self.entries = {line["key"]: line for line in lines[1:] if "key" in line}
        text = [about, *self.entries.values()]
        path.write_text("".join(json.dumps(line) + "\n" for line in text), encoding="utf-8")

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self.entries[key]

    def add(self, key: str, **values: Any) -> None:
        """Record one measurement; it is on disk when this returns."""
        entry = {"key": key, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        self.entries[key] = entry


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            return
        if not isinstance(value, dict):
            return
        yield value
