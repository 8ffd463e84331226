"""The corpus: sources and docstrings of the standard library as it is installed, with some files held out."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from workloads.errors import BadInput

SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "_bundled"}
)
"""Folders that are left out: packages of the installation, tests, and tables of character codes."""

HELD_OUT = 16
"""One file in this many is held out, by a hash of its path."""


@dataclass(frozen=True)
class Corpus:
    """Text by file.

    Attributes:
        training, evaluation: the text of each file, sorted by path; a file is in one of the two.
        description: what it is, for records. digest: of all the text.
    """

    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    description: str
    digest: str


def standard_library(root: Path | None = None) -> Corpus:
    """Read the corpus.

    Args:
        root: the folder whose `*.py` files are read; None: the running Python's standard library.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[str]] = {False: [], True: []}
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if SKIPPED.isdisjoint(name.parts):
            content = path.read_text(encoding="utf-8", errors="replace")
            digest.update(f"{name.as_posix()}\n{content}".encode())
            parts[is_held_out(name.as_posix())].append(content)
    if not (parts[False] and parts[True]):
        raise BadInput("expected Python sources to train on and to hold out", file=folder)
    description = f"standard library of Python {platform.python_version()}" if root is None else folder.name
    return Corpus(tuple(parts[False]), tuple(parts[True]), description, digest.hexdigest()[:16])


def is_held_out(name: str) -> bool:
    """True for the path of a file that no training reads."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT == 0
