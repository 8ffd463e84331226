"""The examples in the documentation run, and every number in them is what comes out."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from latency_models.calibration import Calibration, FitReport, Line, Provenance

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "examples"), [("explanation/latency-models.md", 18), ("reference/calibration-file.md", 12)]
)
def test_the_examples_run(page: str, examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted >= examples
    assert result.failed == 0


def test_the_reference_lists_every_field() -> None:
    text = (DOCS / "reference" / "calibration-file.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    listed = {name.strip(" `") for row in rows for name in row.split(",")}
    known = {
        field.alias or name
        for model in (Calibration, Line, FitReport, Provenance)
        for name, field in model.model_fields.items()
    }
    assert listed == known
