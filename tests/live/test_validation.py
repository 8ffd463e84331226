"""`twin validate`: a whole run on a tiny model, and what is made of measured and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from twin.cli import run
from twin.validation.compare import compare_load, missed, summary

SCENARIO = """\
schema: twin.scenario/1
kind: validation
name: tiny
model: {path: config.json, weights: random}
workload:
  requests: 12
  prefill: {distribution: fixed, mean: 12}
  decode: {distribution: fixed, mean: 6}
  arrivals: {process: poisson}
engine: {kv_blocks: 64, max_num_seqs: 4, max_num_batched_tokens: 32}
loads: [0.5, 0.8]
repeats: 2
probe: {rounds: 10, steps: 30, prompt: 24, answer: 8, pace_share: 0.1}
"""
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 60, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    return file


def test_a_whole_validation(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["validate", str(scenario), "--json", "--runs", str(tmp_path / "runs")])
    document = json.loads(capsys.readouterr().out)
    assert code == (4 if document["missed"] else 0)
    folder = Path(document["run"]["directory"])
    kept = [f"live/load-0.8-repeat-2/{name}.parquet" for name in ("requests", "steps", "pace")]
    for name in ("summary.json", "engine-steps.yaml", "report.html", "figures/over-time.svg", *kept):
        assert (folder / name).exists()
    assert sorted(document["calibration"]["yardsticks"]) == ["1", "64", "8"]
    # Of twelve at a load of 1, so that all loads take equally long.
    assert [(load["load"], load["requests"]) for load in document["loads"]] == [(0.5, 6), (0.8, 10)]
    for load in document["loads"]:
        assert load["rate"] == pytest.approx(load["load"] * document["capacity"])
        assert len(load["measured"]) == len(load["predicted"]) == len(load["pace"]) == 2
        for live, twin in zip(load["measured"], load["predicted"], strict=True):
            tokens = live["output_throughput"] / live["request_throughput"]
            assert tokens == pytest.approx(twin["output_tokens"] / twin["requests"]) == pytest.approx(6)
        assert load["steps"]["all"]["steps"] == sum(kind["steps"] for kind in load["steps"]["by_kind"].values())
        assert max(load["timeline"]["live"]) > 0
        assert load["timeline"]["live"][-1] == load["timeline"]["twin"][-1] == 0
    # What was learnt serves again, and is not learnt anew; also a step ahead.
    again = ["--calibration", str(folder / "engine-steps.yaml"), "--tolerance", "1000", "--set", "loads=[0.5]"]
    again += ["--set", "engine.async_scheduling=true", "--set", "probe.pace_share=0"]
    assert run(["validate", str(scenario), "--runs", str(tmp_path / "runs"), *again]) == 0
    told = capsys.readouterr()
    assert "probing" not in told.err
    assert "Load 0.5" in told.out


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{process: poisson}", "{process: poisson, rate: 3}", "workload.arrivals.rate: got 3, expected none"),
        ("config.json", "nothing.json", "nothing.json: expected a readable file"),
        ("max_num_seqs: 4", "max_num_seqs: 4, data_parallel: 2", "engine.data_parallel"),
        ("kv_blocks: 64", "kv_blocks: 0", "kv_blocks"),
        ("loads: [0.5, 0.8]", "loads: [1.5]", "loads[0]"),
        ("prompt: 24, answer: 8", "prompt: 600, answer: 8", "probe: request"),
        ("weights: random", "weights: random, quantise: {bits: 5}", "model.quantise.bits"),
        ("max_num_seqs: 4", "max_num_seqs: 4, async_scheduling: true", "probe.pace_share: got 0.1, expected 0 with"),
    ],
)
def test_a_bad_scenario_is_one_line(
    old: str, new: str, expected: str, scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(SCENARIO.replace(old, new))
    assert run(["validate", str(scenario), "--runs", str(tmp_path / "runs")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert expected in lines[-1]
    assert len([line for line in lines if not line.startswith("twin: probing")]) == 1


def test_what_knows_no_pace_is_refused_where_it_is_read(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["validate", str(scenario), "--runs", str(tmp_path / "runs"), "--set", "loads=[0.5]", "--tolerance", "1000"]
    assert run([*again, "--set", "probe.pace_share=0"]) == 0
    file = next((tmp_path / "runs").glob("*/engine-steps.yaml"))
    assert "yardsticks: {}" in file.read_text()
    assert run([*again, "--calibration", str(file)]) == 2
    assert "engine-steps.yaml: yardsticks: expected" in capsys.readouterr().err.splitlines()[-1]


def test_a_workload_beyond_the_models_contexts_is_told(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(SCENARIO.replace("mean: 12", "mean: 300"))
    assert run(["validate", str(scenario), "--runs", str(tmp_path / "runs")]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("twin: workload: request 0: expected at most the model's 128 positions, 306")


def test_errors_are_taken_repeat_by_repeat() -> None:
    def one(scale: float) -> dict[str, object]:
        arrival = np.arange(10.0)
        columns = {
            "arrival": arrival,
            "first_token": arrival + 0.1 * scale,
            "last_token": arrival + 0.5 * scale,
            "output_tokens": np.full(10, 5.0),
            "gaps": np.full(40, 0.1 * scale),
        }
        return summary(columns)

    otherwise = {"error_at_own_pace": [one(1.01), one(2.02)]}
    found = compare_load([one(1.0), one(2.0)], [one(1.09), one(2.18)], otherwise)
    assert found["ttft.mean"]["error_at_own_pace"] == pytest.approx(0.01)
    assert found["ttft.mean"]["error"] == pytest.approx(0.09)
    assert found["ttft.mean"]["interval"] == pytest.approx([0.09, 0.09])
    assert found["tpot.mean"]["measured"] == pytest.approx(0.15)
    assert found["ttft.mean"]["repeat_spread"] == pytest.approx(2**0.5 / 3)
    load = {"load": 0.7, "metrics": found, "steps": {"all": {"median": 0.04}}}
    assert missed([load], 1.0) == [
        f"load 0.7: {name} is off by +9.0 %, goal {goal} %"
        for name, goal in (("ttft.mean", 5), ("tpot.mean", 3), ("e2e.mean", 3))
    ]
    assert missed([load], 4.0) == []
