"""The error of step times in a plan: what it costs is said, and nothing good is lost by looking at bad draws first."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.plan_report import percent
from tests.twin.planning.scenarios import document, kind, plan, question, uncertain
from twin.planning.confidence import last_miss
from twin.planning.confirming import OTHER_SEED
from twin.planning.evaluation import DRAWS, SEARCH_DRAWS, _shift
from twin.planning.max_load import changes
from twin.planning.planner import Planner
from twin.planning.result import Plan
from twin.planning.search import Search
from twin.planning.space import Candidate, candidate, families


@cache
def search_and_plan() -> tuple[Planner, Plan, dict[str, Any]]:
    """With the windows of the plan; later tests ask for more."""
    search = uncertain()
    return search, search.run(), dict(search.simulations.store)


def planned() -> tuple[Planner, dict[str, Any]]:
    search, plan, _ = search_and_plan()
    return search, plan.document()


def every(search: Planner) -> list[Candidate]:
    return [candidate for family in search.families for candidate in family.candidates]


def test_the_answer_says_what_the_error_of_the_step_times_costs() -> None:
    search, answer = planned()
    evaluator = search.evaluator(search.question)
    by_estimate, best = answer["by_best_estimate"], answer["recommendation"]
    meets = [trial.candidate.gpus for trial in evaluator.evaluate(every(search)) if trial.meets]
    assert by_estimate["gpus"] == min(meets) < best["gpus"]
    assert by_estimate["sure"] < search.question.spec.confidence <= best["sure"]
    assert f"By the best estimate of the step times {by_estimate['gpus']} GPU" in answer["answer"]
    assert f"the other {best['gpus'] - by_estimate['gpus']} pay for its error" in answer["answer"]
    measures = {unknown.about: unknown.measure for unknown in search.families[0].decode.step_time.unknowns()}
    costliest = by_estimate["costliest_unknown"]
    assert measures[costliest["about"]] == costliest["measure"]


def test_bounds_at_the_cpu_limit_hold_for_the_whole_plan() -> None:
    _, whole, store = search_and_plan()
    assert whole.best is not None
    windows, gpus = list(store.items()), whole.best.candidate.gpus
    for count in (0, len(windows) // 2, len(windows) - 3):
        again = uncertain()
        again.simulations.store |= windows[:count]
        again.simulations.cpu_limit = 1e-9
        part = again.run()
        stop = part.document()["stop"]
        assert stop["least_gpus"] <= gpus
        if part.best is not None:
            assert part.best.candidate.name == whole.best.candidate.name
        else:
            assert part.feasible is None
            assert f"at least {stop['least_gpus']} GPUs" in part.answer()
            assert stop["incumbent"] is None or stop["incumbent"]["meets"]
            assert stop["incumbent"] is None or stop["incumbent"]["gpus"] >= stop["least_gpus"]


def test_no_cheaper_candidate_is_clearly_better_than_the_plan_asks_for() -> None:
    """All windows and all draws of the search give none of them more than one draw beyond the confidence."""
    search, answer = planned()
    evaluator, best, spec = search.evaluator(search.question), answer["recommendation"], search.question.spec
    trials = evaluator.evaluate([entry for entry in every(search) if entry.gpus < best["gpus"]], spec.replications)
    sure = {trial.candidate.name: evaluator.add_all_draws(trial).sure or 0.0 for trial in trials}
    assert sure
    assert max(sure.values()) <= spec.confidence + 1 / DRAWS
    statuses = {entry["name"]: entry["status"] for entry in answer["ledger"]}
    assert {statuses[name] for name in sure} <= {"infeasible", "saturated"}
    assert statuses[best["name"]] == "feasible"
    assert SEARCH_DRAWS <= best["draws"] <= DRAWS


def test_the_worst_draws_are_those_that_move_a_candidate_furthest() -> None:
    search, _ = planned()
    evaluator = search.evaluator(search.question)
    trial = search.search.by_estimate
    assert trial is not None
    evaluator.rank_draws(trial)
    assert len(evaluator.worst_draws) == 3  # a confidence of 0.9 allows two of twenty
    shifts = {draw: max(shift) for draw, shift in enumerate(evaluator.add_all_draws(trial).shifts)}
    assert len(shifts) == DRAWS
    assert min(shifts[draw] for draw in evaluator.worst_draws) >= sorted(shifts.values())[-SEARCH_DRAWS]


@pytest.mark.slow
def test_few_draws_say_what_all_do() -> None:
    """The share under which goals hold is at most one draw off that of all of them, for a quarter of their windows."""
    search, _ = planned()
    evaluator = search.confirming(search.question)
    trials = [trial for trial in evaluator.evaluate(every(search)) if not trial.saturated]
    pairs = [(evaluator.bracket_draws(trial), evaluator.add_all_draws(trial)) for trial in trials]
    shares = {whole.sure for _, whole in pairs}
    assert len(shares) > 3
    assert all(abs((few.sure or 0.0) - (whole.sure or 0.0)) <= 1 / DRAWS + 1e-9 for few, whole in pairs)
    assert sum(few.draws for few, _ in pairs) <= sum(whole.draws for _, whole in pairs) / 4


@given(st.lists(st.booleans(), min_size=1, max_size=24), st.integers(0, 30))
def test_the_last_miss_is_found_from_any_guess(places: list[bool], guess: int) -> None:
    """Exact where misses come first; anywhere else it is a place that misses, before two that do not."""
    tried: set[int] = set()

    def misses(place: int) -> bool:
        tried.add(place)
        return places[place]

    place = last_miss(misses, guess, len(places))
    assert place == -1 or places[place]
    assert not any(places[place + 1 : place + 3])
    ordered = sorted(places, reverse=True)
    assert last_miss(lambda at: ordered[at], guess, len(ordered)) == sum(ordered) - 1


def test_step_times_without_an_error_cost_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "_begin_with_error", lambda self: pytest.fail("nothing to draw"))
    answer = plan(document(engines=[kind("one", 1, 2.0, 1.0)], layouts=["colocated"]))
    assert answer["by_best_estimate"] is None
    assert "best estimate" not in answer["answer"]


def test_model_error_is_separate_from_chance_and_all_rows_have_the_same_windows_and_draws() -> None:
    search, answer = planned()
    rows = {entry["role"]: entry for entry in answer["rows"]}
    assert {"recommended", "best estimate"} <= rows.keys()
    assert {entry["seed"] for entry in answer["rows"]} == {OTHER_SEED}
    assert rows["best estimate"]["draws"] <= rows["recommended"]["draws"]
    assert all(entry["sure"] is not None for entry in answer["rows"])
    best = answer["recommendation"]
    assert f"{100 * best['sure']:.0f} % sure that it meets tpot_p50 ≤ 12 ms" in answer["answer"]
    assert "100 hours like this one if its step times are as estimated" in answer["answer"]
    assert "for 100 requests/s, Poisson arrivals" in answer["answer"]
    # Harder questions are asked about the same windows and draws.
    harder = {row["change"]: row for row in changes(search.confirming, search.question, search.best.candidate)}
    for name in ("rate +20 %", "lengths +20 %", "one engine lost"):
        assert (harder[name]["sure"] or 0.0) <= best["sure"]
        assert percent(harder[name]["probability"]) <= percent(best["probability"])


def test_without_a_candidate_that_is_sure_enough_the_table_shows_the_closest_and_why() -> None:
    """At the best estimate the goal is met by engines with room, and under a third of the draws by none."""
    search = uncertain(goals={"tpot_p50": "6.5ms"})
    answer = search.run().document()
    assert not answer["feasible"]
    assert answer["by_best_estimate"]["sure"] < 0.9
    closest = answer["nearest_miss"]
    assert "with a confidence of 90 %; closest:" in answer["answer"]
    assert f"{100 * closest['sure']:.0f} % sure" in answer["answer"]
    assert answer["rows"][0]["role"] == "best estimate"
    assert closest["sure"] == max(entry["sure"] for entry in answer["rows"])
    assert "draws of the step times" in closest["reason"]


def test_equal_prices_go_to_the_simpler_layout() -> None:
    """Two engines that do both are simpler than one of each, of which the loss of one ends the service."""
    fast = [kind("one", 1, 2.0, 1.0)]
    answer = plan(document(engines=fast, goals={"ttft_p99": "2s"}, limits={"engines": 2}, vary={}))
    best = answer["recommendation"]
    equal = [entry for entry in answer["ledger"] if entry["cost_per_hour"] == best["cost_per_hour"]]
    assert best["layout"] == "colocated"
    both = question(document(engines=[*fast, kind("two", 2, 2.0, 2.0)], vary={}))
    pairs = [candidate(both.spec, family, (2,) * len(family.kinds)) for family in families(both)]
    apart = [candidate(both.spec, family, (1, 1)) for family in families(both) if len(family.kinds) == 2]
    in_order = sorted([*pairs, *apart], key=lambda entry: entry.complexity)
    assert [len(entry.sizes) for entry in in_order] == sorted(len(entry.sizes) for entry in in_order)
    assert in_order[0].devices == "2 = 2×1"
    assert in_order[-1].sizes == (1, 1)
    assert equal


def test_a_recommendation_that_pays_nothing_for_the_error_is_not_said_to() -> None:
    _, result, _ = search_and_plan()
    assert replace(result, best=result.by_estimate).price_of_error() == ""
    assert replace(result, by_estimate=None).price_of_error() == ""
    assert replace(result, best=None, costliest_unknowns=[]).price_of_error().endswith(", but not with its error.")


def test_a_draw_that_an_engine_refuses_misses_every_goal() -> None:
    """A draw may leave too little memory for a window that the best estimate can run."""
    assert _shift({"refused": "out of memory"}, {"excess": [-0.1, 0.2]}) == [math.inf, math.inf]
