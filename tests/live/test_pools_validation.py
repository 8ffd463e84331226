"""`twin validate` of prefill and decode engines: whole runs on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latency_models.io.config_io import read_yaml
from scenarios.validation import check_validation
from tests.live.tiny_validation import write_validation
from twin.cli import run

pytest.importorskip("torch", reason="the live backend needs the extra [live]")

from live.validation.pools import PoolsBackend
from scenarios.engine import SchedulerPlan
from schedulers.engine_config import EngineConfig
from workloads.request import Request

SCENARIO = """\
schema: twin.scenario/1
kind: validation
name: tiny-pools
model: {path: config.json, weights: random}
workload:
  requests: 12
  prefill: {distribution: fixed, mean: 12}
  decode: {distribution: fixed, mean: 6}
  arrivals: {process: poisson}
  models: {count: 2, zipf: 1}
engine: {num_gpu_blocks: 64, max_num_seqs: 4, max_num_batched_tokens: 32}
system: {layout: disaggregated, decode: shared, link: {bandwidth: 1.0e+9, latency: 1.0e-4, bytes_per_token: 256}}
loads: [0.5]
repeats: 2
profiling: {rounds: 10, max_steps: 20, max_prompt_tokens: 24, max_output_tokens: 8}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write_validation(tmp_path, SCENARIO)


def test_a_whole_validation(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["validate", str(scenario), "--json", "--tolerance", "1000", "--runs", str(tmp_path / "runs")])
    document = json.loads(capsys.readouterr().out)
    assert code == {"met": 0, "missed": 4, "undecided": 5}[document["verdict"]]
    assert (document["schema"], document["clock"]) == ("twin.validation/2", "direct")
    (load,) = document["loads"]
    assert set(document["errors"]["ttft.mean"]) == {"0.5"}
    assert document["errors"]["tpot.mean"]["0.5"] == load["metrics"]["tpot.mean"]["error"]
    assert {"prefill", "decode"} <= set(load["steps"]["by_kind"])  # no engine does both
    assert "mixed" not in load["steps"]["by_kind"]
    assert load["timeline"]["live"][-1] == 0


def test_a_profile_in_turns_with_the_replays(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "profiling.in_turns=true", "--set", "profiling.max_steps=10", "--set", "workload.requests=120"]
    command = ["validate", str(scenario), "--json", "--tolerance", "1000", "--runs", str(tmp_path / "runs"), *settings]
    assert run([*command, "--no-figures"]) in (0, 4, 5)
    document = json.loads(capsys.readouterr().out)
    (load,) = document["loads"]
    assert all("error_beforehand" in metric for metric in load["metrics"].values())
    folder = Path(document["run"]["directory"])
    before, in_turns = (read_yaml(folder / name) for name in ("engine-steps-beforehand.yaml", "engine-steps.yaml"))
    assert document["calibration"]["lines"] == in_turns["lines"] != before["lines"]
    assert set(in_turns["frontend"]) == {"route", "deliver", "hand_over"}
    assert sorted(path.name for path in (folder / "profiling").iterdir()) == [
        "load-0.5-repeat-1", "load-0.5-repeat-2", "part-1",
    ]  # fmt: skip


def test_engines_take_requests_at_their_arrivals(scenario: Path) -> None:
    backend = PoolsBackend(check_validation(read_yaml(scenario), {}, scenario).on_device("cpu"), scenario.parent)
    assert len(backend.models) == 2
    config = EngineConfig(num_gpu_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)
    requests = [(Request(i, 5.0 * i, 12, 6, backend.models[i % 2]), 6) for i in range(4)]
    replayed = backend.replay(SchedulerPlan(config), requests)
    columns = replayed.requests
    assert columns["arrival"].tolist() == [0.0, 5.0, 10.0, 15.0]
    assert (columns["noticed"] >= columns["arrival"]).all()
    assert (columns["noticed"] - columns["arrival"] < 1).all()  # the clock jumps to an arrival
    assert columns["output_tokens"].tolist() == [6.0] * 4
    assert (columns["first_token"] - columns["noticed"] > 2e-4).all()  # to an engine and back
    # The second token comes after a report, a command to send, the blocks, and the command to decode.
    assert all(times[1] - times[0] > 4e-4 for times in replayed.token_times)
    assert all(list(times) == sorted(times) and len(times) == 6 for times in replayed.token_times)
    assert len(replayed.spans) == 4 * (1 + 5)


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (["--backend", "cuda"], "system.layout", "expected clock: direct"),
        (["--clock", "wall"], "system.layout", "expected clock: direct"),
        (["--set", "system.link.shared=true"], "system.link.shared", "expected none with layout: disaggregated"),
        (["--set", "system.link.bytes_per_token=100"], "system.link.bytes_per_token", "expected 256"),
        (
            ["--set", "engine.speculative_config={method: ngram, num_speculative_tokens: 2}"],
            "engine.speculative_config",
            "expected none with layout: disaggregated",
        ),
        (["--set", "model.threads=2"], "system.layout", "expected clock: direct"),
    ],
)
def test_bad_input(scenario: Path, arguments: list[str], field: str, expected: str, refusal) -> None:
    message = refusal("validate", str(scenario), *arguments)
    assert f"{field}: " in message
    assert expected in message
