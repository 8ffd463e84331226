"""Memory of an AFD bundle's cards: what fits, what is refused, what is marked, and what is never recommended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twin.afd.point import largest_token_load
from twin.cli import run

TOKENS = {"prefill": 100, "decode": 20}
FIXED = [f"--set=workload.{kind}={{distribution: fixed, mean: {mean}}}" for kind, mean in TOKENS.items()]
"""Every slot holds 100 + 19 tokens at its fullest: 2 x 16 of them 3,808."""


def instances(**fields: float) -> str:
    return "instances={" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"


def full(tokens: float, **more: float) -> str:
    """Cards whose usable memory holds `tokens` tokens beside 500 bytes of weights."""
    return instances(memory=2 * (10 * tokens + 500), gpu_memory_utilization=0.5, kv_bytes_per_token=10,
                     attention_weights=500, **more)  # fmt: skip


def refused(scenario: Path, refusal, *arguments: str) -> str:
    error = refusal("sweep", str(scenario), "--jobs", "1", "--no-figures", *arguments)
    assert not (scenario.parent / "runs").exists()
    return error


def test_memory_is_not_checked_where_it_is_not_known_and_the_table_says_so(
    scenario: Path, sweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = sweep()
    assert document["configurations"][0]["memory"] is None
    assert {(point["fits"], point["attention_memory"]) for point in document["points"]} == {(None, None)}
    monkeypatch.setenv("COLUMNS", "600")
    assert run(["sweep", str(scenario), "--jobs", "1", "--no-figures"]) == 0
    line = "Memory is not checked without instances.memory and instances.kv_bytes_per_token."
    assert line in " ".join(capsys.readouterr().out.split())  # the note may be wrapped


def test_what_fits_to_the_last_token(sweep) -> None:
    document = sweep(*FIXED, "--set", full(32 * 119, ffn_weights=100))
    memory = document["configurations"][0]["memory"]
    assert memory["kv_tokens_p999"] == 32 * 119
    assert memory["kv_tokens_mean"] == pytest.approx(32 * 109.5)
    assert memory["attention_p999"] == memory["limit"] == 10 * 32 * 119 + 500
    assert memory["attention_share"] == 0.5
    assert memory["attention_mean"] == pytest.approx(10 * 32 * 109.5 + 500)
    assert memory["ffn_share"] == 100 / memory["capacity"]
    assert memory["largest_batch_size"] == 16
    assert (memory["fits"], memory["shortage"]) == (True, None)
    assert all(point["fits"] and point["attention_memory"] == memory["limit"] for point in document["points"])


def test_one_token_less_is_refused_with_the_largest_batch_that_fits(scenario: Path, refusal) -> None:
    error = refused(scenario, refusal, *FIXED, "--set", full(32 * 119 - 1))
    assert "batch_size: got 16, expected at most 15: 2 x 16 requests take" in error
    assert "on an attention card" in error
    assert "0.5 of" in error


def test_two_cards_share_the_cache(sweep) -> None:
    document = sweep(*FIXED, "--set", full(16 * 119, attention_cards=2))
    assert document["configurations"][0]["memory"]["largest_batch_size"] == 16
    assert document["points"][0]["fits"] is True


def test_a_sweep_over_batch_sizes_marks_what_does_not_fit_and_recommends_none_of_it(
    scenario: Path, sweep, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*FIXED, "--set", full(32 * 119), "--set", "batch_size=16,17", "--ratio", "1,2"]
    small, large = sweep(*arguments)["configurations"]
    assert small["memory"]["fits"] is True
    assert large["memory"]["fits"] is False
    assert small["simulation"]["best_ratio"] in (1, 2)
    empty = ("best_ratio", "best_topology", "best_ratio_per_card", "best_over_r_star")
    assert [large["simulation"][name] for name in empty] == [None] * 4
    monkeypatch.setenv("COLUMNS", "400")
    assert run(["sweep", str(scenario), "--jobs", "1", *arguments]) == 0
    table = capsys.readouterr().out
    assert "does not fit in memory: 2 x 17 requests take" in table
    assert table.count("r* = ") == 1
    assert [line.split()[-1] for line in table.splitlines() if "A-1F  " in line] == ["%", "%", "over", "over"]
    (figure,) = scenario.parent.glob("runs/*/figures/throughput.svg")
    assert "does not fit in memory" in figure.read_text()
    page = figure.parent.parent / "report.html"
    assert page.read_text().count("memory of a card: attention") == 2


def test_ffn_weights_that_do_not_fit_are_refused(scenario: Path, refusal) -> None:
    bytes_each = instances(memory=1000, kv_bytes_per_token=1e-6, ffn_weights=901, ffn_cards=4)
    error = refused(scenario, refusal, "--set", bytes_each)
    assert "instances.ffn_cards: got 4, expected more cards: FFN weights take" in error


def test_long_prompts_on_real_hardware_are_refused(scenario: Path, refusal) -> None:
    """Llama-3.1-70B: 2 x 64 requests of up to 16,019 tokens at 327,680 bytes each are 672 GB."""
    calibration = "calibration={hardware: h200-sxm, model: llama-3.1-70b, deployment: {precision: PRECISION}}"
    prompts = "workload.prefill={distribution: fixed, mean: 16000}"
    fp8 = [FIXED[1], "--set", calibration.replace("PRECISION", "fp8"), "--set", prompts]
    error = refused(scenario, refusal, *fp8, "--set", "batch_size=64")
    assert "batch_size: got 64, expected at most 11: 2 x 64 requests take 686.1 GB on an attention card" in error
    assert "(KV cache at the 99.9 % quantile 671.9 GB, weights 14.18 GB)" in error
    assert "the limit is 136.3 GB (0.9 of 151.4 GB)" in error
    bf16 = ["--set", calibration.replace("PRECISION", "bf16"), "--set", "instances.gpu_memory_utilization=0.7"]
    error = refused(scenario, refusal, *bf16)
    assert "calibration.deployment.ffn_cards: got 1, expected more cards: FFN weights take 112.7 GB" in error


def test_under_open_arrivals_a_point_is_judged_by_its_simulation(sweep) -> None:
    arrivals = "workload.arrivals={process: poisson, rate: RATE}"
    tight = full(8 * 119)  # half the slots
    rare = sweep(*FIXED, "--set", tight, "--set", arrivals.replace("RATE", "0.0005"), "--ratio", "1")
    frequent = sweep(*FIXED, "--set", tight, "--set", arrivals.replace("RATE", "1.0"), "--ratio", "1")
    assert rare["points"][0]["fits"] is True
    assert frequent["points"][0]["fits"] is False
    assert frequent["points"][0]["attention_memory"] <= 10 * 32 * 119 + 500
    assert rare["configurations"][0]["memory"]["fits"] is False  # were every slot full
    assert rare["simulation"]["best_ratio"] == 1
    assert frequent["simulation"]["best_ratio"] is None


def test_the_largest_load_adds_up_what_microbatches_hold_at_the_same_time() -> None:
    def step(microbatch: int, ready: float, end: float, load: float) -> list[float]:
        return [microbatch, ready, end, 0, 0, load, load, 1, 1]

    # Microbatch 0 holds 10, 4 and 9; microbatch 1 holds 3 until 2.5, then 8: at most 9 + 8, from 4 on.
    steps = np.array([step(0, 0, 2, 10), step(1, 0, 2.5, 3), step(0, 2, 4, 4), step(0, 4, 6, 9), step(1, 2.5, 7, 8)])
    assert largest_token_load(steps, 2) == 17.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_bytes_per_token": 10}, "instances.kv_bytes_per_token: got 10.0, expected instances.memory beside it"),
        ({"gpu_memory_utilization": 0.8}, "instances.gpu_memory_utilization: got 0.8, expected instances.memory"),
        ({"memory": 1e9}, "instances.memory: got 1000000000.0, expected instances.kv_bytes_per_token beside it"),
        ({"memory": 1e9, "gpu_memory_utilization": 1.1}, "instances.gpu_memory_utilization: got 1.1, expected"),
    ],
)
def test_half_of_what_is_needed_is_refused(scenario: Path, refusal, settings: dict[str, Any], message: str) -> None:
    assert message in refused(scenario, refusal, "--set", instances(**settings))


def test_memory_of_derived_hardware_may_be_changed_and_its_model_may_not(scenario: Path, sweep, refusal) -> None:
    calibration = "calibration={hardware: h200-sxm, model: llama-3.1-8b}"
    error = refused(scenario, refusal, "--set", calibration, "--set", "instances.kv_bytes_per_token=1.0")
    assert "instances.kv_bytes_per_token: got 1.0, expected none: a derived calibration has it" in error
    document = sweep("--set", calibration, "--set", "instances.memory=40e9", "--ratio", "1")
    assert document["configurations"][0]["memory"]["limit"] == pytest.approx(36e9)
