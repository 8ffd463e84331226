"""The corpus: the standard library's sources as it is installed, or a text of one's own; a part is held out."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from workloads.errors import BadInput
from workloads.json_files import is_text
from workloads.trace_files import json_lines

SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "_bundled"}
)
"""Folders that are left out: packages of the installation, tests, and tables of character codes."""

SUFFIXES = (".py", ".txt", ".md")
"""Endings of the files in a folder of one's own."""

HELD_OUT = 16
"""One file or line in this many is held out, by a hash of its path, text or prompt."""


@dataclass(frozen=True)
class Corpus:
    """Text by file (sorted by path) or line, each in one of two parts; `digest` is of all of it."""

    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    description: str
    digest: str


def read_corpus(root: Path | None = None) -> Corpus:
    """The corpus of a folder of `SUFFIXES`, a JSONL file with `text` or `prompt` and `answer`, or Python's library."""
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[str]] = {False: [], True: []}
    digest = hashlib.sha256()
    for name, content in _lines(folder) if folder.is_file() else _files(folder, SUFFIXES if root else (".py",)):
        digest.update(f"{name}\n{content}".encode())
        parts[is_held_out(name)].append(content)
    if not (parts[False] and parts[True]):
        raise BadInput(
            f"expected text to train on and to hold out: files of {', '.join(SUFFIXES)}, or lines", file=folder
        )
    description = f"standard library of Python {platform.python_version()}" if root is None else folder.name
    return Corpus(tuple(parts[False]), tuple(parts[True]), description, digest.hexdigest()[:16])


def _files(folder: Path, suffixes: Collection[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in suffixes and SKIPPED.isdisjoint(name.parts) and path.is_file():
            yield name.as_posix(), path.read_text(encoding="utf-8", errors="replace")


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Each line's key, its text or its prompt, which decides whether it is held out; and its whole text."""
    for line, row in json_lines(file):
        fields = ("text",) if "text" in row else ("prompt", "answer")
        texts = [text for text in map(row.get, fields) if isinstance(text, str) and is_text(text)]
        if len(texts) < len(fields):
            raise BadInput("expected a text, or a prompt and an answer", field="row", value=row, file=file, line=line)
        yield texts[0], "".join(texts)


def is_held_out(name: str) -> bool:
    """True for the path, text or prompt of what no training reads."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT == 0
