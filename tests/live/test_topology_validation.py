"""`twin validate` of bundles, pools and autoscaled fleets: whole runs on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the live engine needs the extra [live]")

from latency_models.io.config_io import read_yaml
from live.topologies.direct_time import Post, RecordedTime, Turn
from live.topologies.pools.layout import BLOCKS, FRONT, REPORT, SENT, WORK
from live.topologies.transport import IDLE
from live.validation.bundle import LiveBundle
from live.validation.pools import PoolsBackend, frontend_times, role_steps, route_seconds
from reports.metrics import BundleMetrics, Transfers
from scenarios.engine import SchedulerPlan
from scenarios.validation import check_validation
from schedulers.batches import DecodeBatch, MixedBatch
from schedulers.engine_config import EngineConfig
from tests.live.tiny_validation import write_validation
from twin.cli import run
from twin.validation.backend import Recording
from twin.validation.bundle import compare_ratios, missed_goals
from workloads.request import Request

HEAD = """\
schema: twin.scenario/1
kind: validation
name: tiny
model: {path: config.json, weights: random}
repeats: 2
"""
BUNDLE = (
    HEAD
    + """\
workload:
  prefill: {distribution: uniform, low: 4, high: 12}
  decode: {distribution: geometric, mean: 5}
system: {layout: afd, batch_size: 2, link: {latency: 1.0e-5}}
requests: 16
ratio: "1,2"
profiling: {max_prompt_tokens: 30, max_output_tokens: 12}
"""
)
ENGINES = (
    HEAD
    + """\
workload:
  requests: REQUESTS
  prefill: {distribution: fixed, mean: 12}
  decode: {distribution: fixed, mean: 6}
  arrivals: {process: poisson}
engine: {num_gpu_blocks: 64, max_num_seqs: 4, max_num_batched_tokens: 32}
loads: [0.5]
"""
)
POOLS = (
    ENGINES.replace("REQUESTS", "12\n  models: {count: 2, zipf: 1}")
    + """\
system: {layout: disaggregated, decode: shared, link: {bandwidth: 1.0e+9, latency: 1.0e-4, bytes_per_token: 256}}
profiling: {rounds: 10, max_steps: 20, max_prompt_tokens: 24, max_output_tokens: 8}
"""
)
FLEET = (
    ENGINES.replace("REQUESTS", "300")
    + """\
system:
  autoscaling: {engine: {policy: scheduled, schedule: [[0, 2]], max_replicas: 2, sync_period: 0.05}}
slo: {ttft: 1.0}
profiling: {rounds: 10, max_steps: 10, max_prompt_tokens: 24, max_output_tokens: 8, in_turns: true}
"""
)
CONFIG = EngineConfig(num_gpu_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)

Validate = Callable[..., dict[str, Any]]


@pytest.fixture
def validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Validate:
    """The document of a validation whose exit code is that of its verdict."""

    def validate(scenario: str, *words: str) -> dict[str, Any]:
        file = write_validation(tmp_path, scenario, 256 if scenario == BUNDLE else 128)
        code = run(["validate", str(file), "--json", "--tolerance", "1000", "--runs", str(tmp_path / "runs"), *words])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert code == {"met": 0, "missed": 4, "undecided": 5}[document["verdict"]]
        return document

    return validate


def pools_backend(folder: Path) -> PoolsBackend:
    file = write_validation(folder, POOLS)
    return PoolsBackend(check_validation(read_yaml(file), {}, file).on_device("cpu"), folder)


@pytest.mark.parametrize(
    ("scenario", "arguments", "field", "expected"),
    [
        (BUNDLE, ["--backend", "cuda"], "--backend", "expected cpu with layout: afd"),
        (BUNDLE, ["--clock", "wall"], "--clock", "expected direct with layout: afd"),
        (BUNDLE, ["--calibration", "steps.yaml"], "--calibration", "expected none with layout: afd"),
        (BUNDLE, ["--ratio", "7/2"], "ratio", "expected whole ratios: one FFN instance"),
        (BUNDLE, ["--set", "model.threads=2"], "model.threads", "expected 1"),
        (BUNDLE, ["--set", "workload.arrivals={process: poisson, rate: 1}"], "arrivals.process", "closed_loop"),
        (BUNDLE, ["--set", "system.layout=colocated", "--ratio", "2"], "--ratio", "none with layout: colocated"),
        (POOLS, ["--backend", "cuda"], "system.layout", "expected clock: direct"),
        (POOLS, ["--clock", "wall"], "system.layout", "expected clock: direct"),
        (POOLS, ["--set", "model.threads=2"], "system.layout", "expected clock: direct"),
        (POOLS, ["--set", "system.link.shared=true"], "system.link.shared", "expected none with layout: disaggregated"),
        (POOLS, ["--set", "system.link.bytes_per_token=100"], "system.link.bytes_per_token", "expected 256"),
        (POOLS, ["--set", "engine.speculative_config={method: ngram, num_speculative_tokens: 2}"],
         "engine.speculative_config", "expected none with layout: disaggregated"),
        (FLEET, ["--set", "system.autoscaling.engine={policy: slo, goals: {ttft_p99: 1}, max_replicas: 2}"],
         "system.autoscaling.engine.policy", "expected a policy without goals"),
        (FLEET, ["--set", "system.autoscaling.engine.start_up={warm_up: 1}"],
         "system.autoscaling.engine.start_up", "image alone"),
        (FLEET, ["--set", "slo={}"], "slo", "expected goals"),
        (FLEET, ["--set", "model.threads=2"], "system.autoscaling", "expected clock: direct"),
        (FLEET, ["--set", "system.autoscaling={prefill: {policy: scheduled, schedule: [[0, 2]], max_replicas: 2}}"],
         "system.autoscaling", "expected engine alone"),
    ],
)  # fmt: skip
def test_bad_input(
    scenario: str, arguments: list[str], field: str, expected: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    message = refusal("validate", write_validation(tmp_path, scenario), *arguments)
    assert f"{field}: " in message
    assert expected in message


def test_a_bundle_whose_validation_is_interrupted_and_goes_on(
    validated: Validate, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_validation(tmp_path, BUNDLE, 256)
    command = ["validate", str(file), "--runs", str(tmp_path / "runs"), "--tolerance", "1000"]
    measure, calls = LiveBundle.run_in_turns, list[int]()

    def interrupted(self: LiveBundle, instances: int, loads: object) -> object:
        calls.append(instances)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(self, instances, loads)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveBundle, "run_in_turns", interrupted)
    assert run(command) == 130
    capsys.readouterr()
    document = validated(BUNDLE)
    assert calls == [1, 2, 1, 1, 2]  # what was measured is kept
    assert (document["schema"], document["clock"]) == ("twin.bundle-validation/1", "direct")
    assert [entry["topology"] for entry in document["ratios"]] == ["1A-1F", "2A-1F"]
    assert [entry["requests"] for entry in document["ratios"]] == [16, 32]
    for name in ("throughput", "tpot", "idle_attention", "idle_ffn", "transfer_attention_to_ffn"):
        assert list(document["errors"][name]) == ["1", "2"]
    # The link is given, and rows have the same size on both sides.
    assert document["errors"]["transfer_ffn_to_attention"]["2"] == pytest.approx(0, abs=1e-9)
    assert set(document["best_ratio"]) == {"measured", "predicted", "published", "barrier"}
    assert 0 <= document["regret"] < 1
    assert document["timelines"]["2"]["live"][-1] > 0
    folder = Path(document["run"]["directory"])
    files = ["profiling/ratio-2-repeat-1/stretches.parquet", "live/ratio-2-repeat-2/requests.parquet"]
    for name in ("summary.json", "report.html", "figures/ratios.svg", "figures/over-time.svg", *files):
        assert (folder / name).exists()


def metrics(throughput: float, tpot: float = 0.01, idle: float = 0.2) -> BundleMetrics:
    link = Transfers(10, 100, 1e-4)
    return BundleMetrics(throughput, throughput, throughput, tpot, tpot, idle, idle, 1.0, 10, 10, link, link)


def test_errors_goals_and_regret() -> None:
    measured = {1: [metrics(100), metrics(110)], 2: [metrics(200), metrics(200)], 3: [metrics(190), metrics(190)]}
    predicted = {
        1: [metrics(101), metrics(111.1)],
        2: [metrics(190, 0.0104), metrics(190, 0.0104)],
        3: [metrics(195, idle=0.25), metrics(195, idle=0.25)],
    }
    curve = {"throughput": [1.0, 2.0, 3.0], "r_star": 2.5}
    document = compare_ratios(measured, predicted, {"lines": {}, "published": curve, "barrier": curve})
    assert document["errors"]["throughput"] == pytest.approx({"1": 0.01, "2": -0.05, "3": 195 / 190 - 1})
    assert document["errors"]["idle_ffn"] == pytest.approx({"1": 0, "2": 0, "3": 0.05})  # points, not relative
    assert document["best_ratio"] == {"measured": 2, "predicted": 3, "published": 3, "barrier": 3}
    assert document["regret"] == pytest.approx(0.05)
    assert missed_goals(document, 1.0) == [
        "2A-1F: throughput is off by -5.0 %, goal 3 %",
        "2A-1F: tpot is off by +4.0 %, goal 3 %",
        "3A-1F: idle_attention is off by +5.0 points, goal 2 points",
        "3A-1F: idle_ffn is off by +5.0 points, goal 2 points",
        "all ratios: throughput is off by 2.9 % on average, goal 1.5 %",
        "choosing 3A-1F loses 5.0 % of the measured throughput, goal 1 %",
    ]
    assert missed_goals(document, 100.0) == []


def test_a_validation_of_pools(validated: Validate) -> None:
    document = validated(POOLS)
    assert (document["schema"], document["clock"]) == ("twin.validation/2", "direct")
    (load,) = document["loads"]
    assert set(document["errors"]["ttft.mean"]) == {"0.5"}
    assert document["errors"]["tpot.mean"]["0.5"] == load["metrics"]["tpot.mean"]["error"]
    assert {"prefill", "decode"} <= set(load["steps"]["by_kind"])  # no engine does both
    assert "mixed" not in load["steps"]["by_kind"]
    assert load["timeline"]["live"][-1] == 0


def test_a_profile_in_turns_with_the_replays(validated: Validate) -> None:
    settings = ["--set", "profiling.in_turns=true", "--set", "profiling.max_steps=10", "--set", "workload.requests=120"]
    document = validated(POOLS, *settings, "--no-figures")
    (load,) = document["loads"]
    assert all("error_beforehand" in metric for metric in load["metrics"].values())
    folder = Path(document["run"]["directory"])
    before, in_turns = (read_yaml(folder / name) for name in ("engine-steps-beforehand.yaml", "engine-steps.yaml"))
    assert document["calibration"]["lines"] == in_turns["lines"] != before["lines"]
    assert set(in_turns["frontend"]) == {"route", "deliver", "hand_over"}
    assert sorted(path.name for path in (folder / "profiling").iterdir()) == [
        "load-0.5-repeat-1", "load-0.5-repeat-2", "part-1",
    ]  # fmt: skip


def test_engines_take_requests_at_their_arrivals(tmp_path: Path) -> None:
    backend = pools_backend(tmp_path)
    assert len(backend.models) == 2
    requests = [(Request(i, 5.0 * i, 12, 6, backend.models[i % 2]), 6) for i in range(4)]
    replayed = backend.replay(SchedulerPlan(CONFIG), requests)
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


def test_a_validation_of_a_fleet(validated: Validate) -> None:
    document = validated(FLEET)
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


PREFILL, DECODE = 1, 2


def test_a_prefill_engine_by_hand() -> None:
    """It takes a request at 1, reports its step at 5, is told at 7 where the prompt goes, and has sent it at 8.8."""
    time = RecordedTime()
    time.turns[PREFILL] = [
        Turn(1.0, 1.5, True), Turn(1.5, 5.0, False), Turn(7.0, 9.0, True), Turn(9.0, 9.1, False),
        Turn(9.1, 13.0, False),
    ]  # fmt: skip
    time.posts[PREFILL] = [
        Post(REPORT, 4.9, 5.1, 8), Post(BLOCKS, 8.0, 8.5, 8), Post(SENT, 8.8, 8.9, 8), Post(REPORT, 12.8, 12.9, 8),
    ]  # fmt: skip
    batches = [MixedBatch([]), MixedBatch([])]
    result = role_steps(time, PREFILL, [(batches[0], 1.6, 4.5), (batches[1], 9.2, 12.0)])
    assert result.spans == [(batches[0], 1.0, 5.0), (batches[1], 8.8, 13.0)]
    assert result.hand_overs == [(1, pytest.approx(3.8))]


def test_a_decode_engine_by_hand() -> None:
    """Two steps follow each other; the third waits until 9 for a request."""
    time = RecordedTime()
    time.turns[DECODE] = [Turn(0.0, 3.0, True), Turn(3.0, 3.2, False), Turn(3.2, 6.0, False), Turn(9.0, 12.0, True)]
    time.posts[DECODE] = [Post(REPORT, now, now, 8) for now in (2.9, 5.9, 11.9)]
    batches = [DecodeBatch([]) for _ in range(3)]
    steps = [(batches[0], 0.5, 2.8), (batches[1], 3.3, 5.8), (batches[2], 9.5, 11.8)]
    result = role_steps(time, DECODE, steps)
    assert [(begin, end) for _, begin, end in result.spans] == [(0.0, 3.0), (3.0, 6.0), (9.0, 12.0)]
    assert result.hand_overs == []


def test_frontend_times_are_medians() -> None:
    time = RecordedTime()
    time.posts[FRONT] = [
        Post(IDLE, 1.1, 1.2, 0),
        Post(WORK, 1.2, 1.5, 8),
        Post(WORK, 3.0, 3.4, 8),
    ]
    assert route_seconds(time, [1.0, 2.0, 5.0]) == pytest.approx([0.5, 1.4])
    times = frontend_times([0.5, 1.4, 0.6], [], [(2, 0.8), (1, 0.3), (1, 0.5)])
    assert times == {"route": 0.6, "deliver": 0.0, "hand_over": pytest.approx(0.4)}


@pytest.mark.slow
def test_a_profile_of_a_topology(tmp_path: Path) -> None:
    """Rounds have steps of both pools, of sequences that came with a cache too, and times for what is between."""
    backend = pools_backend(tmp_path)
    result = backend.profile(SchedulerPlan(CONFIG), backend._spec, 1)
    assert len(result.rounds) == 10
    steps = [step for timed in result.rounds for _, step in timed]
    assert all(step.seconds > 0 for step in steps)
    assert {step.chunks > 0 for step in steps} == {True, False}
    assert not any(step.chunks and step.decodes for step in steps)
    assert sum(step.transfers for step in steps) > 0
    assert all((step.received > 0) is (step.transfers > 0) for step in steps)
    assert set(result.frontend) == {"route", "deliver", "hand_over"}
    assert min(result.frontend["route"], result.frontend["deliver"]) >= 1e-4  # the link's latency
    assert result.frontend["hand_over"] >= 2e-4  # a message to the front and one back
