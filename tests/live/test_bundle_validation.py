"""`twin validate` of a bundle: a whole run on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reports.metrics import BundleMetrics, Transfers
from tests.live.tiny_validation import write_validation
from twin.cli import run
from twin.validation.bundle import compare_ratios, missed_goals

SCENARIO = """\
schema: twin.scenario/1
kind: validation
name: tiny-bundle
model: {path: config.json, weights: random}
workload:
  prefill: {distribution: uniform, low: 4, high: 12}
  decode: {distribution: geometric, mean: 5}
system: {layout: afd, batch_size: 2, link: {latency: 1.0e-5}}
requests: 16
ratio: "1,2"
repeats: 2
profiling: {max_prompt_tokens: 30, max_output_tokens: 12}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return write_validation(tmp_path, SCENARIO, 256)


def test_a_whole_validation_that_is_interrupted_and_goes_on(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the live engine needs the extra [live]")
    from live.validation.bundle import LiveBundle

    command = ["validate", str(scenario), "--runs", str(tmp_path / "runs"), "--tolerance", "1000"]
    measure, calls = LiveBundle.run_in_turns, list[int]()

    def interrupted(self: LiveBundle, instances: int, loads: object) -> object:
        calls.append(instances)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(self, instances, loads)  # type: ignore[arg-type]

    monkeypatch.setattr(LiveBundle, "run_in_turns", interrupted)
    assert run(command) == 130
    capsys.readouterr()
    code = run([*command, "--json"])
    assert calls == [1, 2, 1, 1, 2]  # what was measured is kept
    document = json.loads(capsys.readouterr().out)
    assert code == {"met": 0, "missed": 4, "undecided": 5}[document["verdict"]]
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


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (["--backend", "cuda"], "--backend", "expected cpu with layout: afd"),
        (["--clock", "wall"], "--clock", "expected direct with layout: afd"),
        (["--calibration", "steps.yaml"], "--calibration", "expected none with layout: afd"),
        (["--ratio", "7/2"], "ratio", "expected whole ratios: one FFN instance"),
        (["--set", "model.threads=2"], "model.threads", "expected 1"),
        (["--set", "workload.arrivals={process: poisson, rate: 1}"], "workload.arrivals.process", "closed_loop"),
        (["--set", "system.layout=colocated", "--ratio", "2"], "--ratio", "expected none with layout: colocated"),
    ],
)
def test_bad_input(scenario: Path, arguments: list[str], field: str, expected: str, refusal) -> None:
    message = refusal("validate", str(scenario), *arguments)
    assert f"{field}: " in message
    assert expected in message


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
