"""Plans of small questions: against the exhaustive search, against `simulate`, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import twin
from scenarios.reading import read_scenario
from scenarios.validation import engine_pools, single_engine
from tests.twin.planning.scenarios import document, kind, plan, planner, simulations
from twin.planning.evaluation import Evaluator
from twin.planning.planner import Planner
from twin.planning.windows import Trial

RATE = 250.0


def busy(**section: Any) -> dict[str, Any]:
    """The question at a higher rate, with goals that fewer requests confirm than a 99th percentile."""
    scenario = document(**{"goals": {"ttft_p90": "300ms", "tpot_p90": "40ms"}, **section})
    arrivals = {"process": "poisson", "rate": RATE}
    return {**scenario, "workload": {**scenario["workload"], "arrivals": arrivals}}


def exhaustive(planner: Planner) -> dict[str, Trial]:
    """A trial of every candidate by all of its windows."""
    evaluator = Evaluator(planner.question, planner.horizon, simulations())
    candidates = [candidate for family in planner.families for candidate in family.candidates]
    trials = evaluator.evaluate(candidates, planner.question.spec.replications)
    return {trial.candidate.name: trial for trial in trials}


def test_the_recommendation_is_the_exhaustive_optimum() -> None:
    search = planner(busy(limits={"engines": 2}))
    answer = search.run().document()
    trials = exhaustive(search)
    assert 30 <= len(trials) <= 50
    costs = [trial.candidate.cost for trial in trials.values() if trial.meets and trial.candidate.cost is not None]
    assert answer["recommendation"]["cost_per_hour"] == min(costs)
    assert trials[answer["recommendation"]["name"]].meets
    # Pruning is right: all windows reject the candidates that the plan rejects.
    for entry in answer["ledger"]:
        if entry["status"] in ("saturated", "infeasible") and entry["sizes"]:
            assert not trials[entry["name"]].meets, entry


def test_every_candidate_is_in_the_ledger_with_a_reason() -> None:
    short = kind("small", 1, 0.5, 1.0, num_gpu_blocks=8)
    search = planner(busy(engines=[kind("one", 1, 2.0, 1.0), short], limits={"engines": 4}))
    answer = search.run().document()
    statuses = {entry["status"] for entry in answer["ledger"]}
    assert {"feasible", "dominated", "saturated", "out of memory"} <= statuses
    assert all(entry["reason"] for entry in answer["ledger"] if entry["status"] != "feasible")
    assert {entry["name"] for entry in answer["ledger"] if entry["sizes"]} == {
        candidate.name for family in search.families for candidate in family.candidates
    }


def test_a_growing_queue_is_never_feasible_whatever_its_finished_requests_say() -> None:
    """With goals so lax that all finished requests meet them, too few engines are still refused."""
    search = planner(busy(goals={"tpot_p99": 10.0, "ttft_p50": 100.0}, layouts=["colocated"], limits={"engines": 4}))
    answer = search.run().document()
    saturated = [trial for trial in exhaustive(search).values() if trial.saturated]
    assert saturated
    assert all(not trial.meets and "saturated" in trial.reason for trial in saturated)
    assert all((trial.value(1) or 0.0) < 100.0 for trial in saturated)
    assert answer["recommendation"]["name"] not in {trial.candidate.name for trial in saturated}


def test_processes_change_nothing() -> None:
    one, two = (plan(busy(vary={}, layouts=["colocated"], limits={"engines": 4}), jobs=jobs) for jobs in (1, 2))
    assert one == two


def test_the_written_scenario_gives_the_same_figures(command) -> None:
    scenario = busy(vary={}, layouts=["disaggregated"], window=300)
    best = command(scenario, "--write", "out", "--json", "--no-figures", "--brief")["recommendation"]
    again = twin.simulate("out/scenario.yaml", replications=best["windows"], jobs=1).document
    for metric in ("ttft", "tpot", "itl", "e2e", "output_throughput", "steps"):
        assert again["summary"][metric] == best["summary"][metric]
    assert again["intervals"]["ttft.p90"] == best["intervals"]["ttft.p90"]
    by_goal = {goal["name"]: goal["value"] for goal in best["goals"]}
    assert by_goal["ttft_p90"] == pytest.approx(again["summary"]["ttft"]["p90"], rel=1e-12)
    launch = Path("out/launch.sh").read_text()
    assert launch.count("vllm serve") == len(best["sizes"])
    assert "--max-num-seqs 64" in launch
    live = Path("out/serve_live.sh").read_text()
    path = Path("out/scenario.yaml")  # which the live backend accepts
    (engine_pools if len(best["sizes"]) > 1 else single_engine)(read_scenario(path, "serving"), {}, path)
    assert live.count("twin serve-live") == (1 if len(best["sizes"]) > 1 else best["sizes"][0])


def test_no_candidate_meets_the_goals(command) -> None:
    tight = busy(goals={"ttft_p99": "60ms"}, limits={"engines": 2}, layouts=["colocated"])
    tight["workload"]["arrivals"]["rate"] = 180.0  # two engines serve some 220
    stopped = command(tight, "--json", "--no-figures", "--cpu-limit", "1e-3", code=5)
    assert (stopped["feasible"], stopped["nearest_miss"], stopped["stop"]["least_gpus"]) == (None, None, 4)
    answer = command(tight, "--json", "--no-figures", code=3)
    assert answer["run"] == stopped["run"]  # which goes on
    assert (answer["feasible"], answer["recommendation"]) == (False, None)
    assert "ttft_p99 is" in answer["nearest_miss"]["reason"]
    assert answer["nearest_miss"]["gpus"] == 4  # the largest one comes closest


def test_a_goal_that_no_engine_reaches_needs_no_simulation() -> None:
    answer = plan(busy(goals={"tpot_p99": "5ms"}))
    assert not answer["feasible"]
    assert answer["simulated_requests"] == 0
    assert {entry["status"] for entry in answer["ledger"]} == {"infeasible"}
    assert "tpot_p99 is at least" in answer["ledger"][0]["reason"]


def test_a_killed_plan_takes_up_its_windows() -> None:
    first, second = (planner(busy(layouts=["colocated"], vary={})) for _ in range(2))
    document = first.run().document()
    windows = list(first.simulations.store.items())
    new: dict[str, Any] = {}
    second.simulations.store = dict(windows[: len(windows) // 2])
    second.simulations.save = new.__setitem__
    assert second.run().document() == document
    assert new.keys() == dict(windows[len(windows) // 2 :]).keys()


def test_goals_of_one_kind_of_request() -> None:
    lengths = {"prefill": {"distribution": "fixed", "mean": 100}, "decode": {"distribution": "geometric", "mean": 40}}
    tasks = [
        {"task": "generate", "weight": 3.0, **lengths},
        {"task": "classify", "weight": 1.0, "prefill": {"distribution": "fixed", "mean": 800}},
    ]
    scenario = busy(goals={"classify.e2e_p90": "200ms", "tpot_mean": "40ms"}, layouts=["colocated"])
    scenario["workload"] = {"tasks": tasks, "arrivals": {"process": "poisson", "rate": 60}}
    answer = plan(scenario)
    assert answer["feasible"]
    of_class, of_all = answer["recommendation"]["goals"]
    assert 0 < of_class["value"] <= 0.2
    assert of_class["value"] != answer["recommendation"]["summary"]["e2e"]["p90"]
    assert of_all["value"] == pytest.approx(answer["recommendation"]["summary"]["tpot"]["mean"])


def test_headroom_and_changes() -> None:
    search = planner(busy(layouts=["colocated"], replications=8), brief=False)
    result = search.run()
    assert result.headroom.rate >= RATE * 0.98
    changes = {row["change"]: row for row in result.changes}
    assert changes["rate -20 %"]["meets"]
    assert changes["lengths -20 %"]["meets"]
    above = search.evaluator(search.question.at_rate(result.headroom.rate * 1.2))
    (trial,) = above.settle([result.best.candidate])
    assert not trial.meets


def test_no_more_windows_come_than_the_bound_says() -> None:
    search = planner(busy(limits={"engines": 2}))
    bounds: list[int] = []
    search.simulations.advance = lambda key: bounds.append(search.windows_left())
    search.run()
    assert len(bounds) > 20
    assert all(1 + index + windows_left >= len(bounds) for index, windows_left in enumerate(bounds))
    assert bounds[-1] < bounds[0]


def test_the_most_throughput_on_given_devices() -> None:
    answer = plan(busy(objective="throughput", limits={"gpus": 2}, layouts=["colocated"], vary={}))
    assert answer["feasible"]
    assert answer["recommendation"]["gpus"] <= 2
    assert answer["question"]["rate"] > 40
    goals = answer["recommendation"]["goals"]
    assert all(goal["met"] for goal in goals)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"link": None}, "expected a link"),
        ({"goals": {"goodput": 0.9}}, "measure.slo"),
        ({"objective": "throughput"}, "limits.gpus"),
        ({"engines": [kind("one", 1, 2.0, 1.0), kind("one", 2, 2.0, 1.0)]}, "a name that no other kind has"),
        ({"vary": {"max_num_sequences": [1]}}, "max_num_sequences"),
    ],
)
def test_bad_input_is_one_line(change: dict[str, Any], expected: str, refused) -> None:
    line = refused(busy(**change), "--no-figures")
    assert expected in line
    assert "plan.yaml" in line


def test_a_closed_loop_is_planned_by_whole_runs() -> None:
    scenario = document(layouts=["colocated"], vary={}, limits={"engines": 3})
    scenario["workload"] |= {"arrivals": {"process": "closed_loop", "concurrency": 16}, "requests": 300}
    assert plan(scenario)["feasible"]


def test_a_rate_that_changes_is_planned_for_at_its_peaks() -> None:
    """The mean rate stays, but the goals bind while it is three times as high."""
    profile = {"points": [[0, 1], [30, 6], [40, 1]], "between": "steps"}
    one = {"layouts": ["colocated"], "vary": {}, "engines": [kind("one", 1, 2.0, 1.0)]}
    swinging = busy(**one, window=200, goals={"ttft_p99": "300ms"})
    swinging["workload"]["arrivals"]["rate"] = 90.0
    constant = plan(swinging)["recommendation"]
    swinging["workload"]["arrivals"] |= {"profile": profile}
    search = planner(swinging)
    best = search.run().best
    assert (best.candidate.cost or 0.0) > constant["cost_per_hour"]
    written = search.evaluator(search.question).scenario(best.candidate, 200)["workload"]
    assert written["arrivals"]["profile"]["start"] == "random"
    assert written["requests"] == 534  # 200 requests on average, 8/3 times as many in windows at the peak
