"""Answers say what is assumed of adapters, and what isolated models share."""

from __future__ import annotations

from pathlib import Path

import pytest

from scenarios.reading import apply, read_scenario
from scenarios.serving import check_scenario
from twin.serving.plan.plan import describe, make_plan

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "many-models-h100.yaml"


@pytest.mark.parametrize(
    ("strategy", "note"),
    [
        (
            "multi_lora",
            "assumed, not measured: adapters add 770 µs to a step that has any, 33.6 µs for each distinct one",
        ),
        ("isolated", "isolated means engines of their own for each model: 2 of them divide a device"),
        ("sun", None),
    ],
)
def test_notes_of_strategies(strategy: str, note: str | None) -> None:
    document = apply(read_scenario(EXAMPLE, "serving"), {"system.strategy": strategy})
    plan = make_plan(check_scenario(document, {}, EXAMPLE), EXAMPLE.parent, None)
    notes = describe(plan)["step_time"].get("notes", [])
    if note is None:
        assert not any("assumed, not" in row or "isolated" in row for row in notes)
    else:
        assert any(row.startswith(note) for row in notes)
