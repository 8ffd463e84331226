"""Reads the fields that a reference page lists, in tables or in lists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
ITEM = re.compile(r" *- (?P<names>(?:`[^`]+`(?: \*)?(?:, )?)+)(?: \((?P<note>.*?)\))?(?:: (?P<text>.*)|$)")


def names(text: str) -> list[str]:
    """The words in backticks."""
    return re.findall(r"`([^`]+)`", text)


def items_of(text: str) -> Iterator[list[str]]:
    """[names, note, meaning] of each list item such as ``- `a`, `b` (note): meaning``.

    A name of a nested item begins with a dot, and is a field of each name of the item around it, which is none itself.
    """
    lines = re.sub(r"\n +(?! |- )", " ", text).splitlines()
    sections: list[str] = []
    for line, below in pairwise([*lines, ""]):
        if line.startswith("- "):
            sections = names(line)
        item = ITEM.fullmatch(line)
        if item is None or (line.startswith("- ") and below.startswith("  - ")):
            continue
        nested = [f"`{section}{name}`" for section in sections for name in names(item["names"])]
        yield [", ".join(nested) if line.startswith(" ") else item["names"], item["note"] or "", item["text"] or ""]


def rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """(last name in backticks of the heading, or "", cells) of each table row and list item that begins with a name."""
    for section in re.split(r"^(?=#)", (REFERENCE / page).read_text(), flags=re.M):
        heading = ["", *names(section.partition("\n")[0])][-1]
        for line in section.splitlines():
            if line.startswith("| `"):
                yield heading, [cell.strip() for cell in re.split(r" \|(?= |$)", line.removeprefix("|"))]
        for cells in items_of(section):
            yield heading, cells


def config_fields() -> list[set[str]]:
    """Fields of a config.json that are read, refused unless they change nothing, and ignored, as the page has them."""
    text = (REFERENCE / "model-directories.md").read_text(encoding="utf-8").replace("\n  ", " ")
    sections = [re.split(r"^#", part, flags=re.M)[0] for part in text.split("\n### ")[1:4]]
    items = (re.findall(r"^- (.*?)(?:: |$)", section, re.M) for section in sections)
    return [{name for item in listed for name in names(item)} for listed in items]
