"""The architecture page: the files it names are there, and packages import what its table says, and no more."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
PACKAGES: list[str] = CONTRACTS["root_packages"]


def test_every_file_that_it_names_is_there() -> None:
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE))
    assert len(named) > 30
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_a_request_has_at_most_ten_steps_and_each_names_a_file_for_either_backend() -> None:
    steps = re.findall(r"^\| \d+\. .*$", PAGE, re.M)
    assert 5 <= len(steps) <= 10
    for step in steps:
        _, _, twin, live, _ = step.split("|")
        assert re.search(r"`[\w/]+\.py`", twin)
        assert re.search(r"`[\w/]+\.py`", live) or live.strip() == "the same"


def allowed() -> dict[str, set[str]]:
    """For each package, the packages that the table lets it import."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.M)
    return {package: set(re.findall(r"`(\w+)`", cell)) & set(PACKAGES) for package, cell in rows}


def test_the_page_says_what_each_dependency_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"\W*>", requirement)[0] for requirement in project["dependencies"]]
    rows = dict(re.findall(r"^- \*\*([\w-]+)\*\*: (.+)$", PAGE, re.M))
    assert {name for name in names if not rows.get(name)} == set()


@pytest.mark.parametrize("contract", CONTRACTS["contracts"], ids=lambda contract: contract["name"])
def test_the_table_allows_nothing_that_a_contract_forbids(contract: dict[str, list[str]]) -> None:
    pairs = [
        (source, forbidden)
        for source in contract.get("source_modules", [])
        for forbidden in contract["forbidden_modules"]
    ]
    if contract["type"] == "independence":
        pairs = [
            (source, forbidden)
            for source in contract["modules"]
            for forbidden in contract["modules"]
            if source != forbidden
        ]
    for package, forbidden in pairs:
        assert forbidden not in allowed()[package]
