"""Words: what the field does not say is in no file name, public name or page; and pages are short and narrow.

The terms to use instead are in docs/reference/glossary.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
MODULES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

PEOPLE = {"whoever", "nobody", "somebody", "everybody", "anybody"}
"""Pronouns for people. Sequences, requests and tensors are none."""

PRIVATE_WORDS = {
    "asked", "cohort", "cohorts", "plant", "plants", "seat", "seats", "tally", "ticket", "tickets", "told", "wish",
    "wishes", "yardstick", "yardsticks",
}  # fmt: skip
"""Parts of names, and words of pages, that only this project would understand."""

PARTS_OF_NAMES = PEOPLE | PRIVATE_WORDS | {"pace", "tick"}
WORDS_OF_PAGES = PEOPLE | PRIVATE_WORDS - {"asked"} | {"pace"}

OPENINGS = {"As", "How", "Of", "That", "What", "Where", "Whether", "Which", "Whoever", "Why"}
"""Words that begin a sentence which does not stand alone."""


def public_names(tree: ast.Module) -> Iterator[str]:
    """Functions, classes and constants of a module; methods and attributes of its classes. Leading underscores: no."""
    for node in tree.body:
        yield from _defined(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from attributes(node)


def attributes(node: ast.ClassDef) -> Iterator[str]:
    """Methods and attributes of a class, those that `__init__` sets too."""
    for inner in node.body:
        yield from _defined(inner)
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            for each in ast.walk(inner):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and not _private(each.attr):
                    yield each.attr


def _defined(node: ast.stmt) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign):
        names = [each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    yield from (name for name in names if not _private(name))


def _private(name: str) -> bool:
    return name.startswith("_")


def parts(name: str) -> set[str]:
    """Words of a name: `PendingHostCopy` and `pending_host_copy` have the same."""
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def prose(page: Path) -> list[str]:
    """Lines of a page outside code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S).splitlines()


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, and of attributes and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def where(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("package", [*PACKAGES, "docs"])
def test_file_names_are_the_fields_own(package: str) -> None:
    paths = [path for path in sorted((ROOT / package).rglob("*")) if path.suffix in {"", ".py", ".md", ".svg"}]
    assert len(paths) > 5
    retired = [where(path) for path in paths if parts(path.stem) & PARTS_OF_NAMES]
    assert [path for path in retired if "__pycache__" not in path] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_the_fields_own(package: str) -> None:
    retired = []
    for file in (file for file in MODULES if where(file).split("/")[0] == package):
        names = set(public_names(ast.parse(file.read_text())))
        retired += [f"{where(file)}: {name}" for name in sorted(names) if parts(name) & PARTS_OF_NAMES]
    assert retired == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_a_subject_or_a_verb(package: str) -> None:
    unclear = []
    for file in sorted((ROOT / package).rglob("*.py")):
        begins = [text.split()[0] for text in docstrings(ast.parse(file.read_text())) if text.strip()]
        unclear += [f"{where(file)}: {word}" for word in begins if word in OPENINGS]
    assert unclear == []


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_pages_use_the_fields_words(page: Path) -> None:
    words = {word.lower() for word in re.findall(r"[A-Za-z]+", page.read_text())}
    assert sorted(words & WORDS_OF_PAGES) == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=where)
def test_lines_of_pages_have_at_most_120_characters(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_has_at_most_700_words() -> None:
    assert 300 < len(" ".join(prose(ROOT / "README.md")).split()) <= 700


def test_retired_words_are_found() -> None:
    tree = ast.parse("class Seats:\n    most: int\n    def __init__(self):\n        self.tick_count = self._told = 0\n")
    assert set(public_names(tree)) == {"Seats", "most", "tick_count"}
    assert parts("tick_count") & PARTS_OF_NAMES == {"tick"}
    assert parts("Seats") & PARTS_OF_NAMES == {"seats"}
    assert not parts("stick_plantation") & PARTS_OF_NAMES
