"""The error of step times in a plan: what it costs is said, and nothing good is lost by looking at bad draws first."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.twin.planning.scenarios import document, kind, planner
from twin.executors.processes import Processes
from twin.planning.answer import price_of_error
from twin.planning.catalogue import CatalogueQuestion, scenario_of
from twin.planning.judging import DRAWS, RACED
from twin.planning.planner import Planner
from twin.planning.question import read_question
from twin.planning.search import Search
from twin.planning.space import Candidate


@cache
def planned() -> tuple[Planner, dict[str, Any]]:
    """A small model on H100 with step times from data sheets, whose error is wide."""
    goals: dict[str, float | str] = {"ttft_p99": "400ms", "tpot_p99": "12ms"}
    asked = CatalogueQuestion(
        "llama-3.1-8b", ["h100"], goals, 20.0, None, 400.0, 40.0, [1, 2], [1], ["colocated"], ["bf16"], "bf16",
        [2048], {}, None, None,
    )  # fmt: skip
    question = read_question(scenario_of(asked), {"plan.window": 200, "plan.replications": 4}, Path("plan"))
    made = Planner(question, {}, lambda key, window: None, Processes(1), brief=True)
    return made, made.run()


def every(made: Planner) -> list[Candidate]:
    return [each for prospect in made.prospects for each in prospect.candidates]


def test_the_answer_says_what_the_error_of_the_step_times_costs() -> None:
    made, answer = planned()
    judge = made.judge(made.question)
    by_estimate, best = answer["by_best_estimate"], answer["recommendation"]
    meets = [each.candidate.gpus for each in judge.look(every(made)) if each.meets]
    assert by_estimate["gpus"] == min(meets) < best["gpus"]
    assert by_estimate["draws"] == 0
    told = f"By the best estimate of the step times {by_estimate['gpus']} GPU"
    assert told in answer["answer"]
    assert f"the other {best['gpus'] - by_estimate['gpus']} pay for its error" in answer["answer"]
    alone = {unknown.about: unknown.measure for unknown in made.prospects[0].decode.step_time.unknowns()}
    costliest = by_estimate["costliest_unknown"]
    assert alone[costliest["about"]] == costliest["measure"]


def test_no_cheaper_candidate_is_clearly_better_than_the_plan_asks_for() -> None:
    """All windows and all draws of the race give none of them more than one draw beyond the confidence."""
    made, answer = planned()
    judge, best = made.judge(made.question), answer["recommendation"]
    found = {each.name: judge.whole(each)[0].probability for each in every(made) if each.gpus < best["gpus"]}
    assert found
    assert max(found.values()) <= made.question.spec.confidence + 1 / DRAWS
    statuses = {entry["name"]: entry["status"] for entry in answer["ledger"]}
    assert {statuses[name] for name in found} <= {"infeasible", "saturated"}
    assert statuses[best["name"]] == "feasible"
    assert best["draws"] == DRAWS


def test_the_worst_draws_are_those_that_move_a_candidate_furthest() -> None:
    made, _ = planned()
    judge = made.judge(made.question)
    judge.rank_draws(every(made)[0])
    order = judge._draws()
    assert sorted(order) == list(range(DRAWS))
    assert len(judge.worst) == 2  # a confidence of 0.95 allows one of twenty
    (verdict,) = judge.look(every(made)[:1])
    moves = [max(move) for move in judge._moves(verdict, order)]
    assert sum(moves[:RACED]) / RACED > sum(moves) / DRAWS  # windows are others, so the order is not quite the same


def test_step_times_without_an_error_cost_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "_begin_drawing", lambda self: pytest.fail("nothing to draw"))
    answer = planner(document(engines=[kind("one", 1, 2.0, 1.0)], layouts=["colocated"])).run()
    assert answer["by_best_estimate"] is None
    assert "best estimate" not in answer["answer"]


def test_a_recommendation_that_pays_nothing_for_the_error_is_not_said_to() -> None:
    row = {"gpus": 4, "devices": "4 = 2×2", "parallelism": "tp2", "costliest_unknown": None}
    assert price_of_error(row, row) == ""
    assert price_of_error(None, row) == ""
    assert price_of_error(row, None).endswith("4 GPUs suffice (4 = 2×2; tp2), but not with its error.")
