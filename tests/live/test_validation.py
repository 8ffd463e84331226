"""`twin validate`: whole runs on a tiny model, and errors from measured and predicted summaries."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.io.config_io import read_yaml_text
from live.clock import DirectClock
from live.loaded_model import ModelSource
from live.validation.backend import LiveBackend
from live.validation.profiling import EngineProfile, ProfilingLimits, sequences_left, stratified_sizes
from scenarios.validation import check_validation
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from tests.live.tiny_validation import write_validation
from twin.cli import run
from twin.validation.backend import Recording
from twin.validation.compare import compare_load, missed, summary
from workloads.errors import BadInput

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
engine: {num_gpu_blocks: 64, max_num_seqs: 4, max_num_batched_tokens: 32}
loads: [0.5, 0.8]
repeats: 2
profiling: {rounds: 10, max_steps: 30, max_prompt_tokens: 24, max_output_tokens: 8}
clock: wall
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write_validation(tmp_path, SCENARIO)


def command(scenario: Path, *options: str) -> list[str]:
    """Validate into `runs` beside the scenario, where every forecast meets its goals."""
    return ["validate", str(scenario), "--runs", str(scenario.parent / "runs"), "--tolerance", "1000", *options]


def no_device(*_: object, **__: object) -> None:
    raise BadInput("expected a CUDA device, found none", field="device", value="cuda")


def test_a_whole_validation(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of another machine is predicted without its device: nothing is run again."""
    words = ["validate", str(scenario), "--json", "--runs", str(tmp_path / "runs")]
    assert run([*words, "--measure-only"]) == 0
    capsys.readouterr()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("live.validation.backend.LiveBackend.__init__", no_device)
        code = run(words)
        document = json.loads(capsys.readouterr().out)
        assert "expected a CUDA device, found none" in refusal(*words, "--fresh")
    assert document["backend"]["dtype"] == "float32"
    assert code == {"met": 0, "missed": 4, "undecided": 5}[document["verdict"]]
    folder = Path(document["run"]["directory"])
    files = [f"live/load-0.8-repeat-2/{name}.parquet" for name in ("requests", "steps")]
    for name in ("summary.json", "engine-steps.yaml", "report.html", "figures/over-time.svg", *files):
        assert (folder / name).exists()
    assert document["clock"] == document["calibration"]["clock"] == "wall"
    # Of twelve at a load of 1, so that all loads take equally long.
    assert [(load["load"], load["requests"]) for load in document["loads"]] == [(0.5, 6), (0.8, 10)]
    for load in document["loads"]:
        assert load["rate"] == pytest.approx(load["load"] * document["capacity"])
        assert len(load["measured"]) == len(load["predicted"]) == 2
        for live, twin in zip(load["measured"], load["predicted"], strict=True):
            tokens = live["output_throughput"] / live["request_throughput"]
            assert tokens == pytest.approx(twin["output_tokens"] / twin["requests"]) == pytest.approx(6)
        assert load["steps"]["all"]["steps"] == sum(kind["steps"] for kind in load["steps"]["by_kind"].values())
        assert max(load["timeline"]["live"]) > 0
        assert load["timeline"]["live"][-1] == load["timeline"]["twin"][-1] == 0
    # The fitted model serves again without profiling, also with asynchronous scheduling.
    again = ["--calibration", str(folder / "engine-steps.yaml"), "--tolerance", "1000", "--set", "loads=[0.5]"]
    again += ["--no-figures", "--set", "engine.async_scheduling=true", "--clock", "wall"]
    assert run(["validate", str(scenario), "--runs", str(tmp_path / "runs"), *again]) == 0
    output = capsys.readouterr()
    assert "profiling" not in output.err
    assert "Load 0.5" in output.out


def test_chunks_follow_a_goal_by_the_engines_own_step_times(scenario: Path, tmp_path: Path) -> None:
    """No table is given. A goal that no step meets leaves one prompt token a step, and a loose one whole prompts."""
    # On a busy machine steps scatter so much that 99 % of them are only sure to take less than some minutes.
    for goal, fewest, most in (("1.0e-9", 6 * 12, 6 * 12), ("1.0e+9", 1, 6)):
        policy = f"{{policy: slo, slo_seconds: {goal}, min_tokens: 1}}"
        scenario.write_text(SCENARIO.replace("engine: {", f"engine: {{chunking: {policy}, "))
        arguments = ["validate", str(scenario), "--measure-only", "--runs", str(tmp_path / goal)]
        assert run([*arguments, "--set", "loads=[0.5]"]) == 0
        (repeat, *_) = sorted((tmp_path / goal).glob("*/live/*"))
        kinds = [step.kind for step in Recording.read(repeat).steps]
        assert fewest <= len(kinds) - kinds.count("decode") <= most


@pytest.mark.slow
def test_a_validation_of_two_ranks(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "profiling.in_turns=true",
        "engine.tensor_parallel_size=2",
        "workload.requests=30",
        "profiling.max_steps=10",
    )
    options = ["--clock", "direct", *(word for setting in settings for word in ("--set", setting))]
    assert run(command(scenario, "--json", *options)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profiled"] == "in turns"
    assert document["backend"]["tensor_parallel_size"] == 2
    assert 0 <= document["backend"]["sum_latency"] < 0.01


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{process: poisson}", "{process: poisson, rate: 3}", "workload.arrivals.rate: got 3, expected none"),
        ("config.json", "nothing.json", "nothing.json: expected a readable file"),
        ("max_num_seqs: 4", "max_num_seqs: 4, data_parallel_size: 2", "engine.data_parallel_size"),
        ("requests: 12", "requests: 12\n  models: {count: 2}", "workload.models.count: got 2, expected 1: the live"),
        ("num_gpu_blocks: 64", "num_gpu_blocks: 0", "num_gpu_blocks"),
        ("loads: [0.5, 0.8]", "loads: [1.5]", "loads[0]"),
        ("max_prompt_tokens: 24", "max_prompt_tokens: 600", "profiling: request"),
        ("weights: random", "weights: random, quantise: {bits: 5}", "model.quantise.bits"),
        ("engine: {", "engine: {speculative_config: {method: draft_model, num_speculative_tokens: 2}, ", "method: got"),
        (
            "engine: {",
            "engine: {speculative_config: {method: ngram, num_speculative_tokens: 2, acceptance: 0.5}, ",
            "engine.speculative_config: expected no acceptance and no proposed: they are measured",
        ),
        ("clock: wall", "clock: cpu", "clock: got 'cpu', expected 'wall' or 'direct'"),
    ],
)
def test_a_bad_scenario_is_one_line(
    old: str, new: str, expected: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(SCENARIO.replace(old, new))
    assert run(command(scenario)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert expected in lines[-1]
    assert len([line for line in lines if not line.startswith("twin: profiling the engine")]) == 1


UNREAD = SCENARIO.replace("clock: wall\n", "")


def test_a_validation_on_one_cpu_thread_takes_the_direct_clock(
    scenario: Path, capsys: pytest.CaptureFixture[str], refusal
) -> None:
    """It waits for no arrival: requests a day apart are served at once, and tables and figures name the clock."""
    scenario.write_text(UNREAD)
    begin = time.perf_counter()
    again = command(scenario, "--set", "loads=[0.0001]", "--set", "workload.requests=40000")
    assert run(again) == 0
    assert time.perf_counter() - begin < 60
    assert "clock: direct" in capsys.readouterr().out
    (folder,) = (scenario.parent / "runs").iterdir()
    document = json.loads((folder / "summary.json").read_text())
    (load,) = document["loads"]
    assert document["clock"] == document["scenario"]["clock"] == document["calibration"]["clock"] == "direct"
    assert max(load["timeline"]["time"]) > 3 * (time.perf_counter() - begin)
    assert "clock: direct" in (folder / "figures" / "latencies-0.0001.svg").read_text()
    # Steps timed with one clock do not forecast a run with the other.
    assert "engine-steps.yaml: clock: got 'direct', expected steps timed with clock: wall" in refusal(
        *again, "--calibration", str(folder / "engine-steps.yaml"), "--clock", "wall"
    )


@pytest.mark.parametrize(
    ("lines", "device", "clock_name"),
    [
        ("", "cpu", "direct"),
        ("clock: wall", "cpu", "wall"),
        ("model.threads: 2", "cpu", "wall"),
        ("", "cuda", "wall"),
        ("clock: direct, model.threads: 2", "cpu", None),
        ("clock: direct", "cuda", None),
    ],
)
def test_the_clock_is_direct_where_the_cpu_time_of_one_thread_is_all(
    lines: str, device: Literal["cpu", "cuda"], clock_name: str | None, scenario: Path
) -> None:
    settings = read_yaml_text("{" + lines + "}")
    checked = check_validation(read_yaml_text(UNREAD), settings, scenario)
    if clock_name is None:
        with pytest.raises(BadInput, match=r"clock: got 'direct', expected wall with --backend cuda or several"):
            checked.on_device(device)
    else:
        assert checked.on_device(device).clock == clock_name


SPECULATING = (
    UNREAD.replace(
        "engine: {", "engine: {speculative_config: {method: ngram, num_speculative_tokens: 3, prompt_lookup_min: 1}, "
    )
    .replace("rounds: 10", "answers: 8, rounds: 10")
    .replace("max_output_tokens: 8", "max_output_tokens: 48")
    .replace("distribution: fixed, mean: 6", "distribution: fixed, mean: 40")
)


@pytest.mark.slow
def test_a_validation_of_an_engine_that_speculates(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drafts are measured in other answers; a step's drafts are features of it; acceptance is compared."""
    config = scenario.parent / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 12}))
    scenario.write_text(SPECULATING)
    assert run(command(scenario, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    folder = Path(document["run"]["directory"])
    outcomes = json.loads((folder / "draft-outcomes.json").read_text())
    assert len(outcomes["answers"]) == 8
    assert {len(answer["drafted"]) for answer in outcomes["answers"]} == {41}
    assert document["calibration"]["largest"]["drafted"] >= 1
    for load in document["loads"]:
        for name in ("acceptance_rate", "tokens_per_decode"):
            entry = load["metrics"][f"speculation.{name}"]
            assert entry["measured"] > 0
            assert entry["inside"] is not None
        assert load["metrics"]["tpot.mean"]["parts"]["drafts"] > 0
        for live, twin in zip(load["measured"], load["predicted"], strict=True):
            emitted = [side["speculation"]["num_emitted_tokens"] for side in (live, twin)]
            assert emitted == [39 * load["requests"]] * 2
    # The same command has nothing left to run; the fitted steps serve again, with drafts measured anew.
    assert run(command(scenario, "--calibration", str(folder / "engine-steps.yaml"), "--set", "loads=[0.5]")) == 0
    output = capsys.readouterr()
    assert "measuring drafts in 8 answers" in output.err
    assert "Drafts that were accepted, by position" in output.out


HELD = UNREAD.replace(
    "  arrivals:",
    "  sessions: {source: drawn, turns: {distribution: fixed, mean: 3}, growth: {distribution: fixed, mean: 9},"
    " think: {mean: 30.0}, block_tokens: 4}\n  arrivals:",
).replace("max_num_batched_tokens: 32", "max_num_batched_tokens: 32, block_size: 4")


@pytest.mark.slow
def test_a_validation_of_sessions(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four sessions of three turns at a load of 1: pauses pass at once, and the later turns find the earlier cached."""
    scenario.write_text(HELD.replace("rounds: 10", "resent: 0.5, rounds: 10"))
    assert run(command(scenario, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["arriving"] == "sessions"
    for load in document["loads"]:
        metrics = load["metrics"]
        for live, twin in zip(load["measured"], load["predicted"], strict=True):
            # 12, 27 and 42 prompt tokens: 17 and 32 were said before, of which the last has no KV, in blocks of 4.
            for name in ("count", "turns", "requests", "resent_share", "resent_cached"):
                assert live["sessions"][name] == pytest.approx(twin["sessions"][name])
        assert metrics["sessions.time.mean"]["measured"] > 15 > metrics["sessions.waited.mean"]["measured"]
        assert metrics["sessions.resent_cached"]["error"] == pytest.approx(0.0)
        assert metrics["sessions.resent_cached"]["measured"] > 0.8
    assert run(command(scenario, "--set", "loads=[0.5]", "--fresh")) == 0
    output = capsys.readouterr().out
    assert "sessions/s" in output
    assert "time to a session's last answer, s" in output


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            "engine.speculative_config={method: ngram, num_speculative_tokens: 2}",
            "workload.sessions: expected none with",
        ),
        ("system={layout: disaggregated, link: {bandwidth: 1e9, bytes_per_token: 256}}", "workload.sessions: expected"),
    ],
)
def test_sessions_that_live_engines_do_not_hold_are_refused(
    scenario: Path, changed: str, expected: str, refusal
) -> None:
    scenario.write_text(HELD)
    assert expected in refusal("validate", str(scenario), "--set", changed)


@pytest.mark.slow
def test_steps_without_drafts_do_not_forecast_an_engine_that_speculates(scenario: Path, refusal) -> None:
    scenario.write_text(UNREAD)
    again = command(scenario, "--set", "loads=[0.5]")
    assert run(again) == 0
    (file,) = (scenario.parent / "runs").glob("*/engine-steps.yaml")
    scenario.write_text(SPECULATING)
    line = refusal(*again, "--calibration", file)
    assert "engine-steps.yaml: largest.drafted: expected steps with drafts" in line


def test_a_workload_beyond_the_models_context_is_one_line(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario.write_text(SCENARIO.replace("mean: 12", "mean: 300"))
    assert run(command(scenario)) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("twin: workload: request 0: expected at most the model's 128 positions, 306")


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

    earlier = {"error_beforehand": [one(1.01), one(2.02)]}
    metrics = compare_load([one(1.0), one(2.0)], [one(1.09), one(2.18)], earlier)
    assert metrics["ttft.mean"]["error_beforehand"] == pytest.approx(0.01)
    assert metrics["ttft.mean"]["error"] == pytest.approx(0.09)
    assert metrics["ttft.mean"]["interval"] == pytest.approx([0.09, 0.09])
    assert metrics["tpot.mean"]["measured"] == pytest.approx(0.15)
    assert metrics["ttft.mean"]["repeat_spread"] == pytest.approx(2**0.5 / 3)
    load = {"load": 0.7, "metrics": metrics, "steps": {"all": {"median": 0.04}}}
    assert missed([load], 1.0) == [
        f"load 0.7: the forecast of {name} is off by +9.0 %, goal {goal} %"
        for name, goal in (("ttft.mean", 5), ("tpot.mean", 3), ("e2e.mean", 3))
    ]
    assert missed([load], 4.0) == []


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 2]), st.integers(0, 2**32))
def test_sizes_are_spread_over_the_whole_range(rounds: int, largest: int, power: int, seed: int) -> None:
    """One in each of as many equal parts of the roots' range: no seed leaves a part out."""
    sizes = stratified_sizes(np.random.default_rng(seed), rounds, largest, power)
    assert len(sizes) == rounds
    assert min(sizes) >= 1
    assert max(sizes) <= largest
    for i, size in enumerate(sorted(sizes)):
        assert largest * (i / rounds) ** power - 1 <= size <= largest * ((i + 1) / rounds) ** power + 1


@given(st.integers(1, 300), st.integers(2, 200))
def test_all_stay_for_half_a_round_and_leave_evenly_until_one_is_left(num_seqs: int, steps: int) -> None:
    counts = [sequences_left(num_seqs, i, steps) for i in range(steps + 1)]
    assert counts[: steps // 2 + 1] == [num_seqs] * (steps // 2 + 1)
    assert counts[-1] == 1
    falls = [before - after for before, after in itertools.pairwise(counts)]
    assert min(falls) >= 0
    assert max(falls) <= math.ceil(2 * num_seqs / steps) + 1


@pytest.mark.parametrize("resent", [0.0, 0.5])
def test_prompts_begin_as_earlier_ones_where_that_is_asked_for(resent: float, tmp_path: Path) -> None:
    """Then some prompts find blocks in the cache, and no prompt is longer than the limit by more than a token."""
    config = write_validation(tmp_path, "").with_name("config.json")
    source = ModelSource(config, random=True, dtype="float32", device="cpu", threads=1)
    backend = LiveBackend(source, clock="direct")
    engine = backend.engine(EngineConfig(num_gpu_blocks=400, block_size=4, prefix_id_tokens=4, max_num_seqs=4))
    chunks: list[tuple[int, int]] = []
    schedule = engine.schedule

    def watched(begin: float) -> Batch | None:
        batch = schedule(begin)
        chunks.extend((chunk.context, chunk.tokens) for chunk in (batch.chunks if batch is not None else ()))
        return batch

    engine.schedule = watched  # type: ignore[method-assign]
    EngineProfile(engine, ProfilingLimits(40, 8, 4, 10, 20, resent), backend.vocabulary, 3, DirectClock()).run()
    assert any(context for context, _ in chunks) is (resent > 0)
    assert max(context + tokens for context, tokens in chunks) <= 41
