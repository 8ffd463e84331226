"""The error of step times in a plan: what it costs is said, and nothing good is lost by looking at bad draws first."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from reports.planning.table import percent
from tests.twin.planning.scenarios import document, kind, planner, question
from twin.planning.answer import price_of_error
from twin.planning.confirming import OTHER_SEED
from twin.planning.judging import DRAWS, RACED
from twin.planning.load import changes
from twin.planning.planner import Planner
from twin.planning.search import Search
from twin.planning.space import Candidate, candidate, families


def uncertain(**plan: Any) -> Planner:
    """Two engines with linear step times of an error that is stated."""
    engines = [kind("one", 1, 2.0, 1.0), kind("two", 2, 2.0, 1.8)]
    engines = [each | {"step_time": each["step_time"] | {"spread": 0.3}} for each in engines]
    section = {"goals": {"tpot_p50": "12ms"}, "layouts": ["colocated"], "vary": {}, "engines": engines, "window": 300}
    made = document(**{**section, **plan})
    arrivals = {"process": "poisson", "rate": 100}
    return planner({**made, "workload": {**made["workload"], "arrivals": arrivals}})


@cache
def planned() -> tuple[Planner, dict[str, Any]]:
    made = uncertain()
    return made, made.run()


def every(made: Planner) -> list[Candidate]:
    return [each for prospect in made.prospects for each in prospect.candidates]


def test_the_answer_says_what_the_error_of_the_step_times_costs() -> None:
    made, answer = planned()
    judge = made.judge(made.question)
    by_estimate, best = answer["by_best_estimate"], answer["recommendation"]
    meets = [each.candidate.gpus for each in judge.look(every(made)) if each.meets]
    assert by_estimate["gpus"] == min(meets) < best["gpus"]
    assert by_estimate["sure"] < made.question.spec.confidence <= best["sure"]
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
    found = {each.name: judge.whole(each)[0].sure or 0.0 for each in every(made) if each.gpus < best["gpus"]}
    assert found
    assert max(found.values()) <= made.question.spec.confidence + 1 / DRAWS
    statuses = {entry["name"]: entry["status"] for entry in answer["ledger"]}
    assert {statuses[name] for name in found} <= {"infeasible", "saturated"}
    assert statuses[best["name"]] == "feasible"
    assert best["draws"] == DRAWS


def test_the_worst_draws_are_those_that_move_a_candidate_furthest() -> None:
    made, _ = planned()
    judge = made.judge(made.question)
    judge.rank_draws(every(made)[-1])
    order = judge._draws()
    assert sorted(order) == list(range(DRAWS))
    assert len(judge.worst) == 3  # a confidence of 0.9 allows two of twenty
    (verdict,) = judge.look(every(made)[-1:])
    moves = [max(move) for move in judge._moves(verdict, order)]
    assert sum(moves[:RACED]) / RACED > sum(moves) / DRAWS  # windows are others, so the order is not quite the same


def test_step_times_without_an_error_cost_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "_begin_drawing", lambda self: pytest.fail("nothing to draw"))
    answer = planner(document(engines=[kind("one", 1, 2.0, 1.0)], layouts=["colocated"])).run()
    assert answer["by_best_estimate"] is None
    assert "best estimate" not in answer["answer"]


def test_model_error_is_told_apart_from_luck_and_all_rows_stand_on_one_basis() -> None:
    made, answer = planned()
    rows = {each["role"]: each for each in answer["rows"]}
    assert {"recommended", "best estimate"} <= rows.keys()
    assert {(each["draws"], each["seed"]) for each in answer["rows"]} == {(DRAWS, OTHER_SEED)}
    assert all(each["sure"] is not None for each in answer["rows"])
    best = answer["recommendation"]
    told = f"{100 * best['sure']:.0f} % sure that it meets tpot_p50 ≤ 12 ms"
    assert told in answer["answer"]
    assert "100 hours like this one if its step times are as estimated" in answer["answer"]
    assert "for 100 requests/s, Poisson arrivals" in answer["answer"]
    # Harder questions are asked about the same windows and draws.
    harder = {each["change"]: each for each in changes(made._confirming, made.question, made.best.candidate)}  # type: ignore[union-attr]
    for name in ("rate +20 %", "lengths +20 %", "one engine lost"):
        assert (harder[name]["sure"] or 0.0) <= best["sure"]
        assert percent(harder[name]["probability"]) <= percent(best["probability"])


def test_without_a_candidate_that_is_sure_enough_the_table_shows_the_closest_and_why() -> None:
    """At the best estimate the goal is met by engines with room, and under a third of the draws by none."""
    made = uncertain(goals={"tpot_p50": "6.5ms"})
    answer = made.run()
    assert not answer["feasible"]
    assert answer["by_best_estimate"]["sure"] < 0.9
    closest = answer["nearest_miss"]
    assert "with a confidence of 90 %; closest:" in answer["answer"]
    assert f"{100 * closest['sure']:.0f} % sure" in answer["answer"]
    assert answer["rows"][0]["role"] == "best estimate"
    assert closest["sure"] == max(each["sure"] for each in answer["rows"])
    assert "draws of the step times" in closest["reason"]


def test_equal_prices_go_to_the_simpler_layout() -> None:
    """Two engines that do both are simpler than one of each, of which the loss of one ends the service."""
    fast = [kind("one", 1, 2.0, 1.0)]
    answer = planner(document(engines=fast, goals={"ttft_p99": "2s"}, limits={"engines": 2}, vary={})).run()
    best = answer["recommendation"]
    equal = [each for each in answer["ledger"] if each["cost_per_hour"] == best["cost_per_hour"]]
    assert best["layout"] == "colocated"
    asked = question(document(engines=[*fast, kind("two", 2, 2.0, 2.0)], vary={}))
    made = [candidate(asked.spec, each, (2,) * len(each.kinds)) for each in families(asked)]
    apart = [candidate(asked.spec, each, (1, 1)) for each in families(asked) if len(each.kinds) == 2]
    in_order = sorted([*made, *apart], key=lambda each: each.complexity)
    assert [len(each.sizes) for each in in_order] == sorted(len(each.sizes) for each in in_order)
    assert in_order[0].devices == "2 = 2×1"
    assert in_order[-1].sizes == (1, 1)
    assert equal


def test_a_recommendation_that_pays_nothing_for_the_error_is_not_said_to() -> None:
    row = {"gpus": 4, "devices": "4 = 2×2", "parallelism": "tp2", "costliest_unknown": None}
    assert price_of_error(row, row) == ""
    assert price_of_error(None, row) == ""
    assert price_of_error(row, None).endswith("4 GPUs suffice (4 = 2×2; tp2), but not with its error.")
