"""Given deployments: the rate that they bear, and their place beside those of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import twin
from benchmarks.queueing import md1_wait
from tests.twin.planning.scenarios import SMALL, document, kind, plan, planner, question, simulations
from twin.planning.given import given_candidate, plan_of_given
from twin.planning.max_load import changes
from twin.planning.planner import find_max_load
from twin.planning.question import read_question

STEP, STEPS = 1e-2, 20
SERVICE = STEP * STEPS


def deployment(**system: Any) -> dict[str, Any]:
    """A scenario of two engines, as one would simulate it."""
    step = {"source": "linear", "overhead": 0.01, "per_token": 6e-5, "per_kv_token": 2e-7}
    return {**SMALL, "workload": {**SMALL["workload"], "requests": 500}, "step_time": step, "system": system}


APART = {
    "layout": "disaggregated", "prefill_replicas": 2, "decode_replicas": 1,
    "link": {"bandwidth": 1e10, "bytes_per_token": 1e5},
}  # fmt: skip


def server(goals: dict[str, Any], **plan: Any) -> dict[str, Any]:
    """One server with fixed services: M/D/1."""
    return {
        **SMALL,
        "workload": {
            "requests": 1, "prefill": {"distribution": "fixed", "mean": 1},
            "decode": {"distribution": "fixed", "mean": STEPS}, "arrivals": {"process": "poisson", "rate": 1.0},
        },
        "engine": {"num_gpu_blocks": 10**6, "max_num_seqs": 1, "enable_prefix_caching": False},
        "step_time": {"source": "linear", "overhead": STEP},
        "plan": {"goals": goals, "window": 400, "replications": 6, **plan},
    }  # fmt: skip


def max_load(scenario: dict[str, Any]) -> dict[str, Any]:
    path = Path("scenario.yaml")
    load = read_question(plan_of_given(scenario, {}), {}, path)
    return find_max_load(load, given_candidate(scenario, path, load, "server"), simulations()).document()


def test_the_max_load_of_one_server_is_that_of_queueing_theory() -> None:
    rate = 0.7 / SERVICE
    answer = max_load(server({"ttft_mean": STEP + md1_wait(rate, SERVICE)}))
    low, high = answer["interval"]
    assert low <= rate <= high
    assert 0.7 * rate < low <= 1.01 * answer["rate"] <= 1.01 * high < 1.3 * rate
    assert answer["binds"] == "ttft_mean"
    assert answer["deployment"]["probability"] >= 0.95


@pytest.mark.slow
def test_without_a_goal_that_binds_a_queue_ends_the_load() -> None:
    answer = max_load(server({"ttft_p50": "1000s"}))
    assert answer["binds"] is None
    assert "saturated" in answer["beyond"]
    assert 0.85 / SERVICE < answer["rate"] < 1.15 / SERVICE  # a growing queue must outgrow chance in 600 requests


def test_a_goal_that_no_rate_reaches(command) -> None:
    command(server({"tpot_mean": STEP / 2}), "--max-load", code=3)


def test_the_command_prints_the_document_and_takes_goals(command, refused) -> None:
    scenario = server({}, window=200, replications=4)
    del scenario["plan"]["goals"]
    answer = command(scenario, "--max-load", "--slo", "ttft_mean=400ms", "--json")
    assert answer["schema"] == "twin.max-load/1"
    assert answer["interval"][0] <= answer["rate"]
    assert "--gpu" in refused(scenario, "--max-load", "--slo", "ttft_mean=400ms", "--gpu", "h200")
    assert "goals" in refused(scenario, "--max-load")


def test_a_given_deployment_is_simulated_as_its_file_says(tmp_path: Path) -> None:
    """The windows of a given candidate are those of `simulate`, with the same requests."""
    scenario = deployment(**APART)
    path = Path("scenario.yaml")
    base = document(layouts=["colocated"], vary={})
    candidate = given_candidate(scenario, path, question(base), "mine")
    search = planner(base, deployments=[candidate])
    answer = search.run().document()
    (row,) = [row for row in answer["rows"] if row["name"].startswith("given mine")]
    assert row["sizes"] == [2, 1]
    window = search.evaluator(search.question).scenario(candidate, row["requests_a_window"])
    scenario = {**scenario, "workload": window["workload"], "measure": window["measure"], "seed": row["seed"]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(scenario))
    summary = twin.simulate(tmp_path / "mine.yaml", replications=row["windows"], jobs=1).document["summary"]
    assert row["summary"]["ttft"] == summary["ttft"]
    assert any(entry["name"].startswith("given mine") for entry in answer["ledger"])


def test_a_given_deployment_that_is_cheaper_is_recommended() -> None:
    cheaper = deployment(layout="pools", pools=[{"name": "mine", "replicas": 2}])
    cheaper["system"]["pools"][0]["device"] = {"type": "X", "price_per_hour": 0.5}
    scenario = document(layouts=["colocated"], vary={}, replications=8)
    candidate = given_candidate(cheaper, Path("scenario.yaml"), question(scenario), "mine")
    best = plan(scenario, deployments=[candidate])["recommendation"]
    assert (best["name"], best["cost_per_hour"]) == ("given mine 2", 1.0)


def test_its_row_has_its_own_values_of_what_the_plan_varies(command) -> None:
    """The table and the page have a column for each varied field."""
    engine = {"engine": SMALL["engine"] | {"max_num_batched_tokens": 4096}}
    files = {"mine": deployment(layout="colocated", replicas=2) | engine, "apart": deployment(**APART) | engine}
    flags = ("--candidate", "mine.yaml", "--candidate", "apart.yaml", "--brief")
    lines = command(document(layouts=["colocated"], limits={"engines": 3}), *flags, **files).splitlines()
    assert any("given: mine" in line and " 4096 " in line for line in lines)
    (page,) = Path("runs").glob("*/report.html")
    assert "given: mine" in page.read_text()


def test_other_pools_than_one_of_each_role_are_refused() -> None:
    pools = [{"name": "a", "role": "both"}, {"name": "b", "role": "both"}]
    scenario = deployment(layout="pools", pools=pools)
    with pytest.raises(Exception, match="expected one pool of engines"):
        given_candidate(scenario, Path("scenario.yaml"), question(document()), "mine")


def test_hit_rates_of_the_prefix_cache_are_among_the_changes() -> None:
    """Prompts of which four fifths are shared: without hits the engine has many times the work."""
    scenario = document(
        layouts=["colocated"], engines=[kind("one", 1, 2.0, 1.0)], vary={}, limits={"engines": 2}, window=200
    )
    workload = {**SMALL["workload"], "prefill": {"distribution": "fixed", "mean": 2000}}
    prefixes = {"groups": 4, "tokens": 1600}
    scenario |= {"workload": workload | {"prefixes": prefixes}, "engine": {"num_gpu_blocks": 8000, "max_num_seqs": 64}}
    search = planner(scenario | {"workload": scenario["workload"] | {"arrivals": {"process": "poisson", "rate": 8}}})
    best = search.run().best
    rows = {row["change"]: row for row in changes(search.evaluator, search.question, best.candidate)}
    base = best.value(0)
    more, less, none = (
        rows[name]["values"]["ttft_p99"]
        for name in ("shared prefixes -20 %", "shared prefixes +20 %", "no hits in the prefix cache")
    )
    assert base is not None
    assert less <= base < more < none
    assert search.question.with_prefixes(1.3) is None  # 2,080 of 2,000 tokens
