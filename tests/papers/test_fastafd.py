"""FastAFD: stages against hand-computed times, the ring against a recursion, fits against known numbers, real steps."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from papers.fastafd.reproduction import GOAL, FitChoice, reproduce
from papers.fastafd.stages import (
    BundleParameters,
    LayerStages,
    StepMeasurement,
    SystemMeasurement,
    WideEp,
    distinct_experts,
    fit_bundle,
    fit_overhead,
    layer_periods,
    predict_step,
    read_systems,
    relative_error,
)
from reports.blocks import percent
from twin.cli import run

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured" / "afd_gb200"
needs_data = pytest.mark.skipif(not MEASURED.exists(), reason="the measured steps are not at hand")

STAGES = LayerStages(load_hardware("gb200"), load_model("qwen3-235b-a22b"))
KNOWN = BundleParameters(1.3e-6, 0.5, 1.2e-6, 28e-6)
CURVES = {8192: 100, 20000: 40, 100000: 7}


def true_step(prompt: int, batch: int, ratio: float) -> StepMeasurement:
    return StepMeasurement(prompt, batch, ratio, predict_step(STAGES, KNOWN, prompt, batch, ratio).tpot)


def true_steps(prompts: Iterable[int] = CURVES) -> list[StepMeasurement]:
    return [true_step(prompt, CURVES[prompt], ratio) for prompt in prompts for ratio in range(2, 17)]


def write_sweep(folder: Path, rows: Iterable[StepMeasurement]) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "ratio_sweep.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt_tokens", "batch_per_attention_gpu", "attention_trays_per_ffn_tray", "tpot_ms"])
        writer.writerows([row.prompt_tokens, row.batch_size, row.ratio, 1e3 * row.tpot] for row in rows)
    return folder


# -- stages ------------------------------------------------------------------------------------------------------------


def test_stages_by_hand() -> None:
    # 2 (keys, values) · 4 heads · 128 · 2 bytes; an expert has 3 · 4096 · 1536 weights of a byte.
    assert STAGES.kv_read(25, 16384) == pytest.approx(25 * 16384 * 2048 / 8e12)
    assert STAGES.expert_read(1, 4) == pytest.approx(8 * 18_874_368 / 4 / 8e12)
    row = 6 * 4096 * 1536 / 5e15 + 3 * 4096 / 9e11
    assert STAGES.rows(100, 4, 0.5) == pytest.approx(100 * 8 / 4 * row / 0.5)
    attention = STAGES.kv_read(25, 16384) + 25 * 1.3e-6
    assert STAGES.attention(KNOWN, 25, 16384) == pytest.approx(attention)
    tokens = 4 * 7 * 25
    assert STAGES.ffn(KNOWN, 25, 7) == pytest.approx(
        STAGES.expert_read(tokens, 4) + STAGES.rows(tokens, 4, 0.5) + 7 * 1.2e-6
    )


def test_a_step_far_from_balance_is_all_attention_or_all_ffn() -> None:
    step = predict_step(STAGES, KNOWN, 500_000, 2, 1)
    assert step.bound == "attention"
    assert step.tpot == pytest.approx(94 * 2 * (500_000 * 2048 / 8e12 + 1.3e-6))
    assert predict_step(STAGES, KNOWN, 100, 60, 16).bound == "ffn"
    assert predict_step(STAGES, KNOWN, 100, 1, 1).bound == "round trip"


@pytest.mark.parametrize("tokens", [1, 3, 12, 60])
def test_distinct_experts_are_what_draws_give(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    counts = [len({e for _ in range(tokens) for e in rng.choice(128, 8, replace=False)}) for _ in range(300)]
    spread = np.std(counts) / np.sqrt(len(counts))
    assert distinct_experts(tokens, 128, 8) == pytest.approx(np.mean(counts), abs=4 * spread + 1e-9)


duration = st.floats(0.0, 50.0)


@given(st.lists(st.tuples(duration, duration), min_size=1, max_size=2), duration)
def test_the_period_is_that_of_a_ring_played_through(times: list[tuple[float, float]], exchange: float) -> None:
    """Attention and FFN each take the microbatches in turn; half the exchange lies on either way."""
    layers = 1680  # its half, 840, is a multiple of the layers after which a ring of few microbatches repeats itself
    attention_free = ffn_free = 0.0
    ready = [0.0] * len(times)
    passed = []
    for _ in range(layers):
        for index, (attention, ffn) in enumerate(times):
            attention_free = max(attention_free, ready[index]) + attention
            ffn_free = max(ffn_free, attention_free + exchange / 2) + ffn
            ready[index] = ffn_free + exchange / 2
        passed.append(ready[0])
    period = (passed[-1] - passed[layers // 2 - 1]) / (layers - layers // 2)
    longest = max(layer_periods(*map(list, zip(*times, strict=True)), exchange).values())
    assert longest == pytest.approx(period, rel=1e-9, abs=1e-9)


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_numbers_behind_the_steps() -> None:
    parameters = fit_bundle(STAGES, true_steps())
    assert parameters.sequence_seconds == pytest.approx(KNOWN.sequence_seconds, rel=0.03)
    assert parameters.row_efficiency == pytest.approx(KNOWN.row_efficiency, rel=0.03)
    assert parameters.tray_seconds == pytest.approx(KNOWN.tray_seconds, rel=0.1)
    assert parameters.exchange_seconds == pytest.approx(KNOWN.exchange_seconds, rel=0.03)


def test_part_of_two_curves_predicts_another_length_and_batch() -> None:
    parameters = fit_bundle(STAGES, [row for row in true_steps([8192, 100000]) if row.ratio % 3 == 0])
    held_out = [*true_steps([20000]), true_step(8192, 50, 5), true_step(30000, 11, 9)]
    assert max(abs(relative_error(STAGES, parameters, row)) for row in held_out) < 0.01


def test_the_overhead_of_wide_ep_is_found() -> None:
    truth = WideEp(STAGES, KNOWN, 80e-6)
    rows = [SystemMeasurement("m", 8192, gpus, 90, None, 90 / truth.tpot(gpus, 8192, 90), True) for gpus in (8, 16, 32)]
    assert fit_overhead(STAGES, KNOWN, rows) == pytest.approx(80e-6)


# -- the measured steps ------------------------------------------------------------------------------------------------


@needs_data
def test_measured_steps_are_predicted() -> None:
    document = reproduce(MEASURED, FitChoice("1:16"))
    assert all(point["fitted"] for point in document["points"])
    assert np.mean([abs(point["error"]) for point in document["points"]]) <= GOAL["fitted"]
    assert {curve["prompt_tokens"] for curve in document["left_out"]} == {16384, 65536}
    for curve in [*document["curves"], *document["left_out"]]:
        assert curve["error"] <= GOAL["left_out"]
        assert curve["regret"] <= GOAL["regret"]
    assert all(claim["agrees"] for claim in document["claims"])


@needs_data
@pytest.mark.parametrize("ratios", [None, "4,8,12,16", "3:16:3"])
def test_part_of_the_measured_curves_predicts_the_rest(ratios: str | None) -> None:
    document = reproduce(MEASURED, FitChoice(ratios))
    errors = [abs(point["error"]) for point in document["points"] if not point["fitted"]]
    assert 10 < len(errors) < 27
    assert np.mean(errors) <= 0.02


@needs_data
def test_kv_ceilings_are_those_that_vllm_reported() -> None:
    wide_ep = WideEp(STAGES, KNOWN)
    full = [row for row in read_systems(MEASURED) if row.ceiling and row.ratio is None]
    rows = [row for row in full if row.model.startswith("Qwen3")]
    assert len(rows) == 4
    for row in rows:
        assert abs(wide_ep.kv_ceiling(row.gpus, row.prompt_tokens) - row.batch_size) <= 1


# -- the command -------------------------------------------------------------------------------------------------------


@needs_data
def test_the_documents_figures_of_bundles_and_wide_ep_are_what_is_computed() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "explanation" / "afd-theory.md").read_text(encoding="utf-8")
    document = reproduce(MEASURED)
    loss = max(100 * curve["regret"] for curve in document["curves"])
    row = f"throughput lost by the predicted ratio | none; {loss:.1f} % at 65,536"
    assert row in (docs / "accuracy.md").read_text(encoding="utf-8")
    for length in document["comparison"]:
        gains = " | ".join(percent(row["gain"]) for row in length["rows"]).replace("-", "−")
        listed = length["prompt_tokens"] in (2048, 8192, 16384, 65536)
        assert (f"| {length['prompt_tokens']:,} | {gains} |" in page) == listed
        if length["prompt_tokens"] in (2048, 65536):
            assert f"{100 * length['gain_of_best']:.0f} % at {length['prompt_tokens']:,}" in " ".join(page.split())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_sweep(Path("data"), true_steps())
    truth = WideEp(STAGES, KNOWN, 80e-6)
    model = "Qwen3-235B-A22B-FP8"
    lines = [f"{model},8192,vllm-dp-ep,{n},90,{90 / truth.tpot(n, 8192, 90)}," for n in (8, 32, 64)]
    header = "model,prompt_tokens,system,gpus,batch_per_gpu,output_tokens_per_second_per_gpu,note"
    Path("data/systems.csv").write_text("\n".join([header, *lines]) + "\n")
    arguments = ["reproduce", "fastafd", "--data", "data", "--fit", "3:16:2", "--fit-prompts", "8192,20000"]
    assert run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for point in document["points"]:
        assert point["fitted"] == (point["prompt_tokens"] != 100000 and point["ratio"] % 2 == 1)
        assert point["tpot_predicted_ms"] == pytest.approx(point["tpot_measured_ms"], rel=0.01)
    assert [curve["fitted_points"] for curve in document["curves"]] == [7, 7, 0]
    assert all(abs(row["error"]) < 0.01 for row in document["systems"])
    assert len(document["comparison"]) == 7
    folder = tmp_path / document["run"]["directory"]
    assert {file.name for file in (folder / "figures").iterdir()} == {"steps.svg", "layouts.svg"}
    assert run(arguments) == 0
    output = capsys.readouterr().out
    assert "AFD over wide EP" in output
    assert "TPOT at lengths that are not fitted" in output


def test_steps_of_another_folder_are_fitted(tmp_path: Path) -> None:
    fit_folder = write_sweep(tmp_path / "known", true_steps([8192, 100000]))
    folder = write_sweep(tmp_path / "other", true_steps([20000]))
    document = reproduce(folder, FitChoice("2:16"), fit_folder)
    assert not any(point["fitted"] for point in document["points"])
    assert document["curves"][0]["error_predicted"] < 0.01
    assert document["systems"] == document["comparison"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fastafd"], "--data: expected a folder with ratio_sweep.csv"),
        (["fastafd", "--data", "nowhere"], "nowhere"),
        (["fastafd", "--data", "data", "--fit", "99"], "--fit"),
        (["fastafd", "--data", "data", "--fit", "x"], "--fit"),
        (["fastafd", "--data", "data", "--fit-prompts", "1"], "--fit-prompts"),
        (["fastafd", "--data", "broken"], "ratio_sweep.csv:3: tpot_ms"),
        (["fastafd", "--data", "twice"], "ratio_sweep.csv:3: attention_trays_per_ffn_tray"),
        (["fastafd", "--data", "systems"], "systems.csv:2: gpus"),
        (["fastafd", "--data", "data", "--trace", "t.csv"], "--trace"),
        (["sun", "--data", "data"], "--data"),
        (["afd", "--fit", "1"], "--fit"),
        (["moon"], "moon"),
        (["afd", "--quality"], "--quality: expected it with sun or spear only, found it with afd"),
        (["prelude", "--quality"], "--quality: expected it with sun or spear only, found it with prelude"),
        (["sun", "--full"], "--full: got 'True', expected it with --quality only"),
        (["sun", "--seeds", "2"], "--seeds: got '2', expected it with --quality only"),
        (["sun", "--quality", "--seeds", "0"], "--seeds: got 0"),
        (["sun", "--trace", "t.csv"], "--trace"),
        (["prelude", "--trace", "t.csv"], "afd or spear only"),
        (["afd", "--trace", "t.csv"], "t.csv: expected a file"),
        (["spear", "--trace", "t.csv"], "t.csv"),
        (["spear", "--trace", "broken.csv"], "broken.csv"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    step = true_step(8192, 10, 3)
    write_sweep(Path("data"), [step])
    write_sweep(Path("twice"), [step, step])
    write_sweep(Path("broken"), [step, StepMeasurement(8192, 10, 4, -1.0)])
    write_sweep(Path("systems"), [step])
    Path("systems/systems.csv").write_text(
        "model,prompt_tokens,system,gpus,batch_per_gpu,output_tokens_per_second_per_gpu,note\nm,8192,afd-7-1,31,9,99,\n"
    )
    Path("broken.csv").write_text("a,b\n1,2\n")
    assert message in refusal("reproduce", *arguments)
    assert not Path("runs").exists()
