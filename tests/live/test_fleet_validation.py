"""`twin validate` of an autoscaled fleet: a whole run on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live.tiny_validation import write_validation
from twin.cli import run
from twin.validation.backend import Recording

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

SCENARIO = """\
schema: twin.scenario/1
kind: validation
name: tiny-fleet
model: {path: config.json, weights: random}
workload:
  requests: 300
  prefill: {distribution: fixed, mean: 12}
  decode: {distribution: fixed, mean: 6}
  arrivals: {process: poisson}
engine: {num_gpu_blocks: 64, max_num_seqs: 4, max_num_batched_tokens: 32}
system:
  autoscaling: {engine: {policy: scheduled, schedule: [[0, 2]], max_replicas: 2, sync_period: 0.05}}
slo: {ttft: 1.0}
loads: [0.5]
repeats: 2
profiling: {rounds: 10, max_steps: 10, max_prompt_tokens: 24, max_output_tokens: 8, in_turns: true}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write_validation(tmp_path, SCENARIO)


def test_a_whole_validation(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["validate", str(scenario), "--json", "--tolerance", "1000", "--runs", str(tmp_path / "runs")]
    assert run(command) in (0, 4, 5)
    document = json.loads(capsys.readouterr().out)
    (load,) = document["loads"]
    for name in ("fleet.goals_met", "fleet.engine_seconds"):
        assert load["metrics"][name]["measured"] > 0
    share = load["metrics"]["fleet.goals_met"]
    assert share["error"] == pytest.approx(share["predicted"] - share["measured"])
    for repeat in load["engines"]:
        for side in ("live", "twin"):
            assert repeat[side][0] == [0.0, 1, 0, 0, 0]
            (began, *states), *_ = repeat[side][1:]
            assert (began, states) == (0.05, [1, 1, 0, 0])  # a second engine starts at the first decision
    assert document["calibration"]["frontend"]["start_up"] > 0
    kept = Recording.read(Path(document["run"]["directory"]) / "live" / "load-0.5-repeat-1")
    assert kept.scaling is not None
    assert kept.scaling.changes == load["engines"][0]["live"]


@pytest.mark.parametrize(
    ("setting", "field", "expected"),
    [
        ("system.autoscaling.engine={policy: slo, goals: {ttft_p99: 1}, max_replicas: 2}",
         "system.autoscaling.engine.policy", "expected a policy without goals"),
        ("system.autoscaling.engine.start_up={warm_up: 1}", "system.autoscaling.engine.start_up", "image alone"),
        ("slo={}", "slo", "expected goals"),
        ("model.threads=2", "system.autoscaling", "expected clock: direct"),
        ("system.autoscaling={prefill: {policy: scheduled, schedule: [[0, 2]], max_replicas: 2}}",
         "system.autoscaling", "expected engine alone"),
    ],
)  # fmt: skip
def test_bad_input(scenario: Path, setting: str, field: str, expected: str, refusal) -> None:
    message = refusal("validate", str(scenario), "--set", setting)
    assert f"{field}: " in message
    assert expected in message
