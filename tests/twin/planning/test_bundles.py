"""AFD bundles as candidates of a plan: their slots, names, refusals, and the scenario that is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twin
from latency_models.sources.afd_bundle import AfdBundleSpec
from tests.twin.planning.scenarios import SMALL, plan, question
from twin.theory.cycle import load_quantile
from workloads.pairs import JointEmpirical

PREFILL = {
    "name": "tp1",
    "device": {"type": "h200-sxm", "count": 1, "price_per_hour": 3.0},
    "step_time": {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h200-sxm"},
}
BUNDLE = {"model": "llama-3.1-8b", "hardware": "h200-sxm", "ratios": "1,2,3/2", "price_per_hour": 3.0}


def bundled(*, bundles: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Prefill engines and bundles that decode."""
    section = {
        "goals": {"ttft_p90": "300ms", "tpot_p90": "60ms"}, "layouts": ["afd"], "engines": [PREFILL],
        "bundles": [{**BUNDLE, **(bundles or {})}], "link": {"bandwidth": 1e11, "bytes_per_token": 1e5},
        "limits": {"engines": 2}, "replications": 4, "window": 600, **changes,
    }  # fmt: skip
    workload = {**SMALL["workload"], "decode": {"distribution": "geometric", "mean": 60}}
    engine = {"max_num_seqs": 64, "enable_prefix_caching": False}
    return {**SMALL, "workload": workload, "engine": engine, "plan": section}


def test_a_plan_of_bundles_and_the_scenario_that_it_leaves(command) -> None:
    scenario = bundled(bundles={"ratios": "1,2"}, limits={"engines": 1}, window=300)
    answer = command(scenario, "--write", "out", "--json", "--no-figures", "--brief")
    best = answer["recommendation"]
    # One attention and one FFN instance suffice, beside one GPU that prefills.
    assert (best["layout"], best["devices"], best["gpus"]) == ("afd", "3 = 1×1 P + (1A+1F) D", 3)
    assert best["cost_per_hour"] == 9.0
    assert "decode on AFD bundles" in answer["answer"]
    again = twin.simulate("out/scenario.yaml", replications=best["windows"], jobs=1)
    assert again.document["summary"]["tpot"] == best["summary"]["tpot"]
    launch = Path("out/launch.sh").read_text()
    assert "There is no command for a bundle of 1 attention and 1 FFN instances" in launch
    assert launch.count("vllm serve") == 1
    for name in ("compose", "llm-d", "dynamo"):
        text = Path(f"out/{name}.yaml").read_text()
        assert "there is no command for AFD bundles" in text
        assert "router:" not in text


def test_slots_are_those_whose_caches_fit() -> None:
    fp8 = question(bundled(bundles={"model": "llama-3.1-8b", "weights": "fp8"}))
    (kind,) = [kind for kind in fp8.spec.engines if kind.name == "2A1F"]
    assert kind.engine["max_num_seqs"] == 2 * 64  # `max_num_seqs` of the scenario, for each attention instance
    long = bundled()
    long["workload"]["prefill"] = {"distribution": "lognormal", "mean": 40_000, "cv": 0.5}
    few = {kind.name: kind.engine["max_num_seqs"] for kind in question(long).spec.engines if kind.is_bundle}
    slots = few["2A1F"] // 2
    assert 0 < slots < 64
    assert few == {"1A1F": slots, "2A1F": 2 * slots, "3A2F": 3 * slots}
    # One sequence more would exceed the memory of an attention instance with a probability above 0.1 %.
    scenario = question(long)
    lengths = scenario.sample(scenario.plan({**scenario.document, "step_time": PREFILL["step_time"]}))
    pairs = JointEmpirical(lengths.prompts, np.maximum(lengths.answers, 1))
    pool = next(kind for kind in question(long).spec.engines if kind.name == "1A1F")
    capacity = AfdBundleSpec.model_validate(pool.step_time).build(scenario.path.parent).instance_tokens()
    assert load_quantile(pairs, slots, 0.999, in_step=False) <= capacity
    assert load_quantile(pairs, slots + 1, 0.999, in_step=False) > capacity


def test_bundles_that_do_not_fit_are_out_of_memory_with_the_reason() -> None:
    answer = plan(bundled(bundles={"model": "llama-3.1-70b", "ffn_gpus": [1], "hardware": "l40s"}))
    bundles = [entry for entry in answer["ledger"] if entry["layout"] == "afd"]
    assert {entry["status"] for entry in bundles} == {"out of memory"}
    assert all("leave room" in entry["reason"] for entry in bundles)


def test_models_without_stages_are_unsupported() -> None:
    scenario = bundled(bundles={"model": "gpt-oss-20b", "ffn_gpus": [1]}, layouts=["colocated", "afd"], window=200)
    answer = plan(scenario)
    bundles = [entry for entry in answer["ledger"] if entry["layout"] == "afd"]
    assert {entry["status"] for entry in bundles} == {"unsupported"}
    assert all("sliding windows" in entry["reason"] for entry in bundles)
    assert answer["recommendation"]["layout"] == "colocated"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"layouts": ["colocated"]}, "expected none, or afd in layouts"),
        ({"bundles": []}, "expected some, since layouts has afd"),
        ({"link": None}, "since layouts has afd"),
        ({"bundles": [{**BUNDLE, "ratios": "0"}]}, "expected a ratio above 0"),
        ({"bundles": [{**BUNDLE, "hardware": "h300"}]}, "h300"),
    ],
)
def test_bad_input_is_one_line(change: dict[str, Any], expected: str, refused) -> None:
    scenario = bundled()
    scenario["plan"] |= change
    assert expected in refused(scenario, "--no-figures")
