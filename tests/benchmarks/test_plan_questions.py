"""Forty questions: the GPUs that measured rows allow."""

from __future__ import annotations

from benchmarks.error_board.rows import Row, Workers
from benchmarks.plan_questions import Question, measured, questions


def row(tpot: float, workers: Workers, isl: float = 8192.0) -> Row:
    """Twenty requests in flight, each of which takes 1 s and 1,023 tokens."""
    return Row(
        "a", "vllm", "0.19", "h200_sxm", "deepseek-v3", "fp8", isl, 1024.0, False, 20.0, workers, None, 1.0, tpot
    )  # fmt: skip


def test_measured_deployments_that_meet_the_goals_at_the_rate_by_littles_law() -> None:
    question = Question("deepseek-v3", "h200", "long")
    assert question in questions()
    engine = row(0.02, Workers(8))  # 20 / (1 + 1,023 x 0.02) = 0.93 requests/s, and 5 are asked for
    assert measured(question, [engine]) == 6 * 8
    assert measured(question, [engine, row(0.02, Workers(4))]) == 6 * 4
    assert measured(question, [row(0.051, Workers(8))]) is None  # a goal is missed
    assert measured(question, [row(0.02, Workers(8), isl=1024.0)]) is None  # other lengths
