"""Words: docstrings begin with a verb or a noun; pages use the field's words, and are short and narrow.

The terms to use are in docs/reference/glossary.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

UNCLEAR_WORDS = {
    "anybody", "cohort", "cohorts", "everybody", "nobody", "pace", "plant", "plants", "seat", "seats", "somebody",
    "tally", "ticket", "tickets", "told", "whoever", "wish", "wishes", "yardstick", "yardsticks",
}  # fmt: skip
"""Words for people, which sequences and requests are not, and words that only this project would understand."""

OPENINGS = {"As", "How", "Of", "That", "What", "Where", "Whether", "Which", "Whoever", "Why"}
"""Words that begin a sentence which does not stand alone."""


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
    assert sorted(words & UNCLEAR_WORDS) == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=where)
def test_lines_of_pages_have_at_most_120_characters(page: Path) -> None:
    assert [line for line in prose(page) if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_has_at_most_700_words() -> None:
    assert 300 < len(" ".join(prose(ROOT / "README.md")).split()) <= 700
