"""Differences between replications are a property of the plan, and intervals are given only where something does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.io.config_io import write_yaml
from tests.twin.serving.scenarios import plan_for, records, run, scenario
from twin.cli import run as command

FIXED: dict[str, Any] = {
    "requests": 20,
    "prefill": {"distribution": "fixed", "mean": 40},
    "decode": {"distribution": "fixed", "mean": 8},
    "arrivals": {"process": "deterministic", "rate": 20.0},
}
UNIFORM = {"distribution": "uniform", "low": 1, "high": 90}
SHORT = {"distribution": "fixed", "mean": 3}
CLOSED = {"process": "closed_loop", "concurrency": 4}
CHAT = {"task": "generate", "weight": 1, "prefill": SHORT, "decode": SHORT}
JUDGE = {"task": "score", "weight": 1, "prefill": SHORT}
NO_LENGTHS = {"prefill": None, "decode": None}


@pytest.mark.parametrize(
    ("workload", "system", "expected"),
    [
        ({}, {}, []),
        ({"prefill": UNIFORM}, {}, ["lengths"]),
        ({"prefill": {"distribution": "uniform", "low": 5, "high": 5}}, {}, []),
        ({"arrivals": {"process": "poisson", "rate": 20}}, {}, ["arrivals"]),
        ({"arrivals": {"process": "gamma", "rate": 20, "cv": 2}}, {}, ["arrivals"]),
        ({"arrivals": CLOSED}, {}, []),
        ({"arrivals": {**CLOSED, "think": 0.1}}, {}, []),
        ({"arrivals": {**CLOSED, "think": 0.1, "think_cv": 1}}, {}, ["think_times"]),
        ({"models": {"count": 2}}, {}, ["models"]),
        ({"prefixes": {"groups": 1, "tokens": 32}}, {}, []),
        ({"prefixes": {"groups": 2, "tokens": 32}}, {}, ["prefixes"]),
        ({**NO_LENGTHS, "tasks": [CHAT]}, {}, []),
        ({**NO_LENGTHS, "tasks": [CHAT, JUDGE]}, {}, ["lengths"]),
        ({**NO_LENGTHS, "tasks": [{**JUDGE, "prefill": UNIFORM}]}, {}, ["lengths"]),
        ({}, {"replicas": 3, "routing": "round_robin"}, []),
        ({}, {"replicas": 3, "routing": "power_of_two"}, ["routing"]),
        ({}, {"replicas": 1, "routing": "power_of_two"}, []),
    ],
)
def test_replications_differ_exactly_where_the_plan_says_so(
    workload: dict[str, Any], system: dict[str, Any], expected: list[str]
) -> None:
    """Two replications are compared record by record, so a source of randomness that is not named would be seen."""
    document = scenario(workload={**FIXED, **workload}, system={"layout": "colocated", **system})
    document["workload"] = {key: value for key, value in document["workload"].items() if value is not None}
    assert list(plan_for(document).random) == expected
    assert (records(run(document, 0)) != records(run(document, 1))) == bool(expected)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [f"{0.1 * i},{30 + i},{2 + i % 3}" for i in range(12)]
    (tmp_path / "trace.csv").write_text("\n".join(["arrival,prompt_tokens,output_tokens", *rows]) + "\n")
    replay = {"trace": {"path": "trace.csv"}, "arrivals": {"process": "replay"}}
    (tmp_path / "s.yaml").write_text(write_yaml({**scenario(), "workload": replay}))
    (tmp_path / "drawn.yaml").write_text(write_yaml(scenario()))
    return tmp_path


@pytest.fixture
def simulated(printed: Callable[..., Any]) -> Callable[..., Any]:
    return partial(printed, "simulate", "--no-figures", "--jobs", "1")


def test_a_replay_is_run_once_and_has_no_interval(
    workspace: Path, simulated, capsys: pytest.CaptureFixture[str]
) -> None:
    document = simulated("s.yaml", "--replications", "5")
    assert (document["random"], document["replications"], document["intervals"]) == ([], 1, {})
    assert command(["simulate", "s.yaml", "--replications", "5", "--no-figures"]) == 0
    output = capsys.readouterr()
    assert "One run; no interval: everything in this run is fixed, and the error of these" in output.out
    assert "another run" not in output.out
    assert "[2/" not in output.err


def test_a_sweep_runs_each_point_as_often_as_it_draws(workspace: Path, printed) -> None:
    system = "system={layout: colocated, replicas: 2, routing: power_of_two},{layout: colocated, replicas: 2}"
    points = printed("sweep", "s.yaml", "--jobs", "1", "--replications", "3", "--set", system)["points"]
    assert [(point["random"], point["replications"]) for point in points] == [(["routing"], 3), ([], 1)]
    assert points[0]["intervals"]
    assert not points[1]["intervals"]


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_draws_from_what_has_no_distribution_are_refused(workspace: Path, refusal, verb: str) -> None:
    line = refusal(verb, "drawn.yaml", "--draws", "20")
    assert "drawn.yaml: --draws: got 20, expected 0" in line
    assert "step_time.source linear" in line
    assert not (workspace / "runs").exists()


def write_steps(path: Path) -> None:
    """A log of noisy steps, in the columns that `vllm_step_log` reads."""
    rng = np.random.default_rng(3)
    names = (
        "experiment_id,workload,step.id,step_time_us,batch.num_prefill_reqs,batch.prefill_tokens,"
        "batch.num_decode_reqs,kv.usage_gpu_ratio,kv.blocks_total_gpu"
    )
    rows = [names]
    for step in range(200):
        prompts, decodes, usage = int(rng.integers(2)), int(rng.integers(1, 40)), rng.uniform(0.1, 0.9)
        tokens = prompts * int(rng.integers(2, 500))
        seconds = 4000 + 20 * (tokens + decodes) + 2000 * usage + rng.normal(0, 300)
        rows.append(f"e,chat,{step},{seconds:.1f},{prompts},{tokens},{decodes},{usage:.4f},1000")
    path.write_text("\n".join(rows) + "\n")


def test_draws_of_a_fit_are_taken_where_nothing_else_is_random(workspace: Path, simulated) -> None:
    write_steps(workspace / "steps.csv")
    document = {**scenario(), "workload": {"trace": {"path": "trace.csv"}, "arrivals": {"process": "replay"}}}
    fit = {"source": "vllm_step_log", "path": "steps.csv"}
    (workspace / "fit.yaml").write_text(write_yaml({**document, "step_time": fit}))
    printed = simulated("fit.yaml", "--draws", "10", "--replications", "4")
    assert (printed["random"], printed["replications"], printed["draws"]) == (["step_time"], 1, 10)
    low, high = printed["intervals"]["e2e.mean"]["confidence"]
    assert low < printed["summary"]["e2e"]["mean"] < high


def test_each_unknown_is_varied_alone_and_the_most_costly_stands_first(workspace: Path, simulated) -> None:
    step_time = {"source": "linear", "overhead": 5e-3, "per_token": 1e-6, "spread": 0.1}
    memory = {"memory": 3e10, "model": "llama-3.1-8b", "activations": 2e9}
    engine = {**scenario()["engine"], "num_gpu_blocks": None, "kv_memory": memory}
    (workspace / "spread.yaml").write_text(write_yaml({**scenario(), "step_time": step_time, "engine": engine}))
    document = simulated("spread.yaml", "--draws", "10")
    assert [assumption["name"] for assumption in document["assumptions"]] == ["overhead", "per_token", "kv_blocks"]
    deviation = document["assumptions"][0]["deviation"]
    assert deviation["tpot.mean"] == pytest.approx(np.sinh(0.1), rel=0.05)
    low, high = document["intervals"]["tpot.mean"]["prediction"]
    assert np.log(high / low) / 2 > 0.1
    assert document["intervals"]["tpot.mean"]["parts"]["sampling"] is None
    assert all(low < high for interval in document["intervals"].values() for low, high in [interval["prediction"]])


@pytest.mark.parametrize("verb", ["simulate", "sweep"])
def test_draws_that_are_too_few_for_an_interval_are_refused(workspace: Path, refusal, verb: str) -> None:
    assert "--draws: got 3, expected 0, or 10 and more" in refusal(verb, "drawn.yaml", "--draws", "3")


def test_replications_are_drawn_as_often_unless_stated(workspace: Path, simulated) -> None:
    step_time = {"source": "linear", "overhead": 5e-3, "spread": 0.1}
    workload = {**FIXED, "arrivals": {"process": "poisson", "rate": 20}}
    (workspace / "both.yaml").write_text(write_yaml(scenario(step_time=step_time, workload=workload)))
    default = simulated("both.yaml", "--replications", "3")
    assert (default["replications"], default["draws"]) == (3, 10)
    parts = default["intervals"]["e2e.mean"]["parts"]
    assert parts["sampling"] > 0
    assert parts["model"] == pytest.approx(0.1, rel=0.9)
    large = simulated("both.yaml", "--replications", "12")
    assert (large["replications"], large["draws"]) == (12, 12)
    single = simulated("both.yaml", "--replications", "3", "--draws", "0")
    assert (single["draws"], single["intervals"]["e2e.mean"]["parts"]["model"]) == (0, None)


def test_the_number_of_blocks_is_drawn_where_it_was_computed() -> None:
    stated = plan_for(scenario()).pools[0]
    assert stated.at({"kv_blocks": 2.0}).scheduler == stated.scheduler
    engine = {**scenario()["engine"], "num_gpu_blocks": None, "kv_memory": {"memory": 3e10, "model": "llama-3.1-8b"}}
    computed = plan_for({**scenario(), "engine": engine}).pools[0]
    blocks = computed.scheduler.config.num_gpu_blocks
    assert computed.at({"kv_blocks": 2.0}).scheduler.config.num_gpu_blocks == pytest.approx(blocks * np.exp(0.1), abs=1)
