"""Questions made of measured rows: the load and the goals are what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_measured import ENGINES, question_of, rate_of
from benchmarks.silicon import SiliconRow
from twin.planning.question import read_question


def row() -> SiliconRow:
    """An engine of two GPUs with 16 requests in flight, each of which takes 0.1 s + 99 x 20 ms."""
    return SiliconRow(
        "a", "vllm", "h200_sxm", "llama-3.1-70b", "fp8", 1000.0, 100.0, 16.0, 2, 1, 1, 0.1, 0.02, "dev", ""
    )


def test_as_many_requests_are_in_flight_as_were_measured() -> None:
    assert rate_of(row()) == pytest.approx(16 / (0.1 + 99 * 0.02))


def test_goals_and_lengths_are_those_that_were_measured() -> None:
    question = read_question(question_of(row()), {}, Path("measured.yaml"))
    assert {goal.name: goal.limit for goal in question.goals} == {"tpot_mean": 0.02, "ttft_mean": 0.1}
    assert question.rate == pytest.approx(ENGINES * rate_of(row()), rel=1e-4)
    (kind,) = question.spec.engines
    assert (kind.device.count, kind.step_time["weights"]) == (2, "fp8")  # type: ignore[index]
