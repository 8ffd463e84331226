"""Ablations: changes are those of the same requests, verdicts follow the interval, and what cannot be is said."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from latency_models.io.files import find_data
from latency_models.sources.roofline.work import WHOLE_STEP
from latency_models.step_time import Unknown
from tests.twin.serving.scenarios import scenario
from twin.api.inputs import choose_executor
from twin.cli import main
from twin.sweeps.ablation import (
    LAYOUT_ERROR,
    Ablation,
    prepare_ablation,
    relative_changes,
    verdict,
    with_layout_error,
)
from twin.sweeps.one_run import read_plan, simulate
from workloads.errors import BadInput

HERE = Path("scenario.yaml")
SHARING = scenario(
    workload={
        "requests": 60,
        "prefixes": {"groups": 2, "tokens": 256},
        "prefill": {"distribution": "fixed", "mean": 400},
    },
    step_time={"source": "linear", "overhead": 0.002, "per_token": 1e-4, "per_kv_token": 0.0},
)


def rows(ablation: Ablation) -> dict[tuple[str, str, str], dict[str, Any]]:
    documents: dict[str, Any] = {}
    with choose_executor("local", 1).start() as started:
        for _ in ablation.sweep.run(documents, lambda key, point: None, started):
            pass
    summary = ablation.summarise(documents)
    return {(row["feature"], row["value"], row["context"]): row for row in summary["rows"]}


def test_a_change_is_that_of_the_same_requests() -> None:
    """The mean over seeds of the ratio of two runs, each of which `simulate` makes, too."""
    ablation = prepare_ablation(SHARING, HERE, names=["prefix_caching"], objective="e2e.mean", replications=3)
    row = rows(ablation)["prefix_caching", "on", "alone"]
    ratios = []
    for seed in range(3):
        on, off = (
            simulate(read_plan(SHARING, HERE, {"engine.enable_prefix_caching": caching}), seed).report["summary"]
            for caching in (True, False)
        )
        ratios.append(on["e2e"]["mean"] / off["e2e"]["mean"])
    change = row["changes"]["e2e.mean"]
    assert change["change"] == pytest.approx(sum(ratios) / 3 - 1)
    assert change["low"] < change["change"] < change["high"] < 0
    assert row["verdict"] == "pays"


def test_features_alone_and_with_the_others_on() -> None:
    more = {"engine.max_num_seqs": [1], "engine.block_size": [0]}
    ablation = prepare_ablation(
        SHARING,
        HERE,
        names=["prefix_caching", "speculation", "routing"],
        more=more,
        objective="e2e.mean",
        replications=2,
    )
    assert set(ablation.skipped) == {"speculation", "routing"}
    table = rows(ablation)
    assert table["engine.max_num_seqs", "1", "alone"]["verdict"] == "costs"
    impossible = table["engine.block_size", "0", "alone"]
    assert impossible["verdict"] == "not possible"
    assert "block_size" in impossible["reason"]
    assert ("engine.block_size", "0", "others on") not in table
    together = table["prefix_caching", "on", "others on"]
    assert together["settings"]["on"] == {"engine.max_num_seqs": 1, "engine.enable_prefix_caching": True}
    assert together["settings"]["off"] == {"engine.max_num_seqs": 1, "engine.enable_prefix_caching": False}


def test_what_changes_nothing_has_no_effect() -> None:
    ablation = prepare_ablation(SHARING, HERE, names=[], more={"engine.scheduler": ["vllm-0.33"]}, replications=2)
    (row,) = rows(ablation).values()
    assert row["verdict"] == "no effect"


def test_a_single_run_that_nothing_varies_is_certain() -> None:
    fixed = {"distribution": "fixed", "mean": 40}
    document = SHARING | {"workload": {"requests": 20, "prefill": fixed, "decode": fixed,
                                       "arrivals": {"process": "deterministic", "rate": 20.0}}}  # fmt: skip
    ablation = prepare_ablation(document, HERE, names=[], more={"engine.max_num_seqs": [1]}, replications=2)
    (row,) = rows(ablation).values()
    change = row["changes"]["e2e.mean"]
    assert change["low"] == change["change"] == change["high"] > 0
    assert row["verdict"] == "costs"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"names": ["wings"]}, "--features"),
        ({"names": ["speculation"]}, "--features"),
        ({"objective": "beauty"}, "--objective"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as refusal:
        prepare_ablation(SHARING, HERE, **arguments)
    assert refusal.value.field == field


@pytest.mark.parametrize("change", [{"engine": None}, {"step_time": "roofline"}, {"system": {"replicas": "x"}}])
def test_a_scenario_is_checked_first(change: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as refusal:
        prepare_ablation(SHARING | change, HERE)
    assert str(refusal.value.field).partition(".")[0] in change


def test_a_model_file_is_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_bytes(find_data("models", "qwen3-30b-a3b").read_bytes())
    document = SHARING | SPARSE | {"step_time": SPARSE["step_time"] | {"model": "m.yaml"}}
    ablation = prepare_ablation(document, tmp_path / "s.yaml", names=["data_parallel", "offload"])
    assert not ablation.skipped


def test_shapes_on_the_same_devices() -> None:
    document = SHARING | {
        "step_time": {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h200-sxm", "tensor_parallel": 2}
    }
    document |= {"system": {"replicas": 2}}
    document["engine"] = {key: value for key, value in document["engine"].items() if key != "num_gpu_blocks"}
    ablation = prepare_ablation(document, HERE, names=["parallelism", "disaggregate", "offload", "routing"])
    values = {(comparison.feature, comparison.value) for comparison in ablation.comparisons}
    assert values == {
        ("parallelism", "1 x TP 4"), ("parallelism", "4 x TP 1"), ("disaggregate", "1P 1D"), ("offload", "on"),
        ("routing", "prefix_aware"),
    }  # fmt: skip
    assert not ablation.sweep.infeasible


SPARSE = {
    "step_time": {"source": "roofline", "model": "qwen3-30b-a3b", "hardware": "h200-sxm", "tensor_parallel": 2},
    "engine": {key: value for key, value in SHARING["engine"].items() if key != "num_gpu_blocks"},
    "system": {
        "replicas": 2,
        "device": {"type": "H200", "count": 2, "price_per_hour": 4.0, "power_limit": 700.0},
    },
}


def test_cost_and_energy_of_the_same_devices() -> None:
    """Twice the ranks on half the engines have the same price an hour; a token costs what throughput makes of it."""
    features = ["parallelism", "data_parallel", "disaggregate"]
    ablation = prepare_ablation(
        SHARING | SPARSE, HERE, names=features, replications=1, draws=0, objective="cost_per_million_output_tokens"
    )
    table = rows(ablation)
    settings = table["parallelism", "1 x TP 4", "alone"]["settings"]
    assert settings["on"]["system.device.count"] == 4
    for key in (("parallelism", "1 x TP 4"), ("data_parallel", "DP 2"), ("disaggregate", "1P 1D")):
        row = table[(*key, "alone")]
        cost, rate = (row["changes"][name]["change"] for name in (ablation.objective, "output_throughput"))
        assert (1 + cost) * (1 + rate) == pytest.approx(1)
        assert row["changes"]["energy.joules_per_output_token"]["change"] != 0
        assert row["verdict"] == ("pays" if cost < 0 else "costs")


def test_a_change_of_layout_has_the_error_between_layouts() -> None:
    """Ten draws whose ratios agree get the interval of `LAYOUT_ERROR` alone; throughput and latency mirror each other.

    Step times without an unknown of whole steps, as measured ones, have none.
    """
    ratios = {"output_throughput": 1.1, "ttft.mean": 1 / 1.1, "goodput": None}
    assert with_layout_error([ratios] * 10, []) == [ratios] * 10
    draws = with_layout_error([ratios] * 10, [Unknown(WHOLE_STEP, "steps", "held out", 0.2)])
    logs = [math.log(draw["output_throughput"] or 0) for draw in draws]
    assert statistics.mean(logs) == pytest.approx(math.log(1.1))
    assert statistics.stdev(logs) == pytest.approx(0.2 * LAYOUT_ERROR, rel=0.05)
    assert all(draw["output_throughput"] == pytest.approx(1 / (draw["ttft.mean"] or 0)) for draw in draws)
    for varied, expected in (([ratios] * 10, "pays"), (draws, "undecided")):
        change = relative_changes([ratios], varied)["output_throughput"]
        assert verdict(change, "output_throughput") == expected


def test_features_that_exclude_each_other_are_not_on_together() -> None:
    """Drafts need synchronous scheduling and no data-parallel ranks, host memory prefix caching; shares by position say
    nothing of more drafts.
    """
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "acceptance_by_position": [0.5, 0.3, 0.1]}
    document = SHARING | SPARSE
    document |= {"engine": document["engine"] | {"speculative_config": speculative, "async_scheduling": False}}
    ablation = prepare_ablation(document, HERE, names=[
        "speculation", "async_scheduling", "data_parallel", "routing", "offload", "prefix_caching",
    ])  # fmt: skip
    together = [comparison for comparison in ablation.comparisons if comparison.context == "others on"]
    assert {comparison.value for comparison in together} >= {"1 drafts", "3 drafts"}
    assert not {"5 drafts", "7 drafts"} & {comparison.value for comparison in together}
    settings = [comparison.settings for comparison in ablation.sweep.infeasible]
    assert not [pair for pair in together if pair.on in settings or pair.off in settings]


def test_the_command_prints_and_leaves_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step times from data sheets have unknowns, which are drawn."""
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(SHARING | {"step_time": SPARSE["step_time"]}))
    options = ["--features", "prefix_caching", "--replications", "2", "--jobs", "1", "--runs", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["ablate", str(file), *options, "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "twin.ablation/1"
    folder = Path(document["run"]["directory"])
    assert (folder / "figures" / "ablation.svg").exists()
    assert "prefix_caching" in (folder / "report.html").read_text()
