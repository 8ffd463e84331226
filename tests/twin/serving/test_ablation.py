"""Ablations: changes are those of the same requests, verdicts follow the interval, and what cannot be is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.twin.serving.scenarios import scenario
from twin.cli import main
from twin.executors.executor import choose_executor
from twin.sweeps.ablation import Ablation, prepare_ablation
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


def test_shapes_on_the_same_devices() -> None:
    document = SHARING | {
        "step_time": {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h200-sxm", "tensor_parallel": 2}
    }
    document |= {"system": {"replicas": 2}}
    document["engine"] = {key: value for key, value in document["engine"].items() if key != "num_gpu_blocks"}
    ablation = prepare_ablation(document, HERE, names=["parallelism", "disaggregate", "offload", "routing"])
    values = {(comparison.change.feature, comparison.change.value) for comparison in ablation.comparisons}
    assert values == {
        ("parallelism", "1 x TP 4"), ("parallelism", "4 x TP 1"), ("disaggregate", "1P 1D"), ("offload", "on"),
        ("routing", "prefix_aware"),
    }  # fmt: skip
    assert not ablation.sweep.infeasible


def test_the_command_prints_and_leaves_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(SHARING))
    options = ["--features", "prefix_caching", "--replications", "2", "--jobs", "1", "--runs", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["ablate", str(file), *options, "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "twin.ablation/1"
    folder = Path(document["run"]["directory"])
    assert (folder / "figures" / "ablation.svg").exists()
    assert "prefix_caching" in (folder / "report.html").read_text()
