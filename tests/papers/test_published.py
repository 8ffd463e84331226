"""The published tables that lie beside the papers' programs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "published"

TABLES = (
    "afd/optimal_ratio", "afd/latency_parameters", "prelude/oneshot", "prelude/decode_control", "prelude/concurrency",
    "spear/chunk_scheduling", "sun/concurrency", "sun/decode_pool",
)  # fmt: skip


@pytest.mark.skipif(not SHARED.exists(), reason="the published tables are not at hand")
@pytest.mark.parametrize("name", TABLES)
def test_the_project_s_copy_of_the_facts(name: str) -> None:
    paper, table = name.split("/")
    copied, original = ROOT / "papers" / paper / "data" / f"{table}.csv", SHARED / f"{paper}_{table}.csv"
    assert rows(copied) == rows(original)


def rows(path: Path) -> list[list[str]]:
    return list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
