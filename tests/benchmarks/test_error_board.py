"""Rows are read by what their sources mean, what is left out is predicted as without it, and intervals are scored."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy_page
from benchmarks.error_board.cells import Judged, in_own_cell
from benchmarks.error_board.correction import LEVELS, Case, Deviations, Prior, covariance, left_out
from benchmarks.error_board.loop import settings, simulated
from benchmarks.error_board.prediction import predict
from benchmarks.error_board.rows import ASSUMED, DRAFTS, Row, Workers, read_rows
from benchmarks.error_board.scripts import script
from benchmarks.left_out import REACH, Comparison, pooled
from benchmarks.plan_questions import Question, measured, questions
from benchmarks.silicon import RANDOM_RANGE_MEAN
from latency_models.sources.linear import LinearStepTime

STAGE = ("num_workers", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
COLUMNS = (
    "id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "precision", "mode", "isl",
    "osl", "batch_size", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "decode_batch_size",
    *(f"{stage}_{name}" for stage in ("prefill", "decode") for name in STAGE), "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
AGGREGATED = {
    "id": "one", "silicon_data_source": "source_file=2026-04-06.csv; silicon_concurrency=64", "backend": "sglang",
    "model_path": "deepseek-ai/DeepSeek-R1", "system": "b200_sxm", "precision": "fp8", "mode": "agg", "isl": "1000",
    "osl": "100", "batch_size": "64", "tp_size": "8", "attention_dp_size": "1", "moe_tp_size": "8",
    "moe_ep_size": "1", "silicon_ttft_ms": "500", "silicon_tpot_ms": "20",
}  # fmt: skip
APART = {
    **AGGREGATED, "mode": "disagg", "batch_size": "", "tp_size": "", "attention_dp_size": "", "moe_tp_size": "",
    "moe_ep_size": "", "prefill_tp_size": "4", "prefill_attention_dp_size": "1", "prefill_moe_tp_size": "1",
    "prefill_moe_ep_size": "4", "decode_tp_size": "8", "decode_attention_dp_size": "1", "decode_moe_tp_size": "1",
    "decode_moe_ep_size": "8",
}  # fmt: skip
STATED = APART | {
    "prefill_num_workers": "1", "decode_num_workers": "4", "prefill_attention_dp_size": "4", "prefill_tp_size": "1"
}  # fmt: skip


def in_flight(number: int) -> dict[str, str]:
    return {"silicon_data_source": f"source_file=2026-04-06.csv; silicon_concurrency={number}"}


def read(folder: Path, *rows: dict[str, str]) -> list[Row]:
    (folder / "systems").mkdir(exist_ok=True)
    with (folder / "systems" / "silicon_sample.csv").open("w") as stream:
        writer = csv.DictWriter(stream, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return read_rows(folder)


@pytest.mark.parametrize(
    ("columns", "layout", "refused"),
    [
        ({}, "tp8", False),
        ({"moe_tp_size": "1", "moe_ep_size": "8"}, "tp8 ep", False),
        ({"tp_size": "64", "moe_ep_size": "8"}, "tp8 ep", False),
        ({"tp_size": "1", "attention_dp_size": "16", "moe_tp_size": "4", "moe_ep_size": "4"}, "dp4 ep", False),
        ({"tp_size": "4", "attention_dp_size": "4", "moe_tp_size": "1", "moe_ep_size": "16"}, "dp4 ep", False),
        ({"tp_size": "2", "attention_dp_size": "", "moe_tp_size": "4", "moe_ep_size": "1"}, "tp2 dp2", False),
        ({"tp_size": "72", "moe_tp_size": "72"}, "tp72", True),
    ],
)
def test_a_layout_is_read_as_its_source_means_it(
    columns: dict[str, str], layout: str, refused: bool, tmp_path: Path
) -> None:
    (row,) = read(tmp_path, {**AGGREGATED, **columns})
    assert (row.layout, bool(row.refusal)) == (layout, refused)
    assert row.isl == pytest.approx(900)


def test_one_measurement_has_one_layout(tmp_path: Path) -> None:
    """A row that states its workers speaks for the others of the same TTFT and TPOT; the next row is like it."""
    same, stated, like = read(tmp_path, APART, STATED, APART | in_flight(90) | {"silicon_ttft_ms": "600"})
    assert same.layout == stated.layout == like.layout == "dp4 ep + 4x tp8 ep"
    assert same.assumption == stated.assumption == ""
    assert like.assumption.startswith(ASSUMED)
    assert same.measurement == stated.measurement != like.measurement


def row_of(model: str, layout: int, in_flight: float, system: str = "h100_sxm") -> Row:
    return Row(
        f"{model} {layout} {in_flight}", "vllm", "1", system, model, "fp8", 1000.0, 200.0, False, in_flight,
        Workers(layout), None, 0.1, 0.01,
    )  # fmt: skip


def cases(*systems: str) -> list[Case]:
    """Three models in three layouts, each of which ran on one of the systems."""
    rng = np.random.default_rng(0)
    models = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")
    rows = [
        row_of(model, layout, in_flight, system)
        for model in models
        for layout, system in zip((1, 2, 4), systems or ("h100_sxm",) * 3, strict=True)
        for in_flight in (4.0, 16.0)
    ]
    return [Case(row, predict(row), float(rng.normal(0.1, 0.1)), predict(row).tpot_shares) for row in rows]


PRIOR = Prior({level: Deviations(0.1, 0.05, 0.2) for level in LEVELS}, 0.05)


@pytest.mark.parametrize("group", ["configuration", "model"])
def test_what_is_left_out_is_predicted_as_without_it(group: str) -> None:
    """The blocks of one inverse are, case by case, the posterior given the cases of other groups alone."""
    known = cases()
    result = left_out(known, PRIOR, [group])[group]
    signal, errors = covariance(known, PRIOR), np.array([case.error for case in known])
    names = np.array([case.level(group) for case in known])
    for name in set(names):
        inside, rest = names == name, names != name
        gain = signal[np.ix_(inside, rest)] @ np.linalg.inv(
            signal[np.ix_(rest, rest)] + PRIOR.scatter**2 * np.eye(int(rest.sum()))
        )
        variance = np.diag(signal[np.ix_(inside, inside)] - gain @ signal[np.ix_(rest, inside)])
        assert result.mean[inside] == pytest.approx(gain @ errors[rest])
        assert result.deviation[inside] ** 2 == pytest.approx(variance + PRIOR.scatter**2)


@pytest.mark.parametrize("group", ["configuration", "model", "system"])
def test_the_truth_of_what_is_left_out_moves_no_prediction_of_it(group: str) -> None:
    known = cases("h100_sxm", "h100_sxm", "h200_sxm")
    name = known[0].level(group)
    told = [
        Case(case.row, case.prediction, case.error + (2.0 if case.level(group) == name else 0.0), case.shares)
        for case in known
    ]
    before, after = (left_out(some, PRIOR, [group])[group] for some in (known, told))
    inside = [case.level(group) == name for case in known]
    assert after.mean[inside] == pytest.approx(before.mean[inside], abs=1e-9)
    assert after.deviation[inside] == pytest.approx(before.deviation[inside], abs=1e-9)


def test_the_interval_of_a_cell_is_that_of_its_other_layouts() -> None:
    judged = [
        Judged(row := row_of("qwen3-32b", layout, in_flight), predict(row), {"tpot": error}, {})
        for layout, error in ((1, 0.1), (2, -0.2))
        for in_flight in (1.0, 2.0, 3.0, 4.0)
    ]
    summary = in_own_cell(judged)
    assert summary["coverage"] == 0.5  # errors of 0.1 within 1.645 times 0.2, and not the other way round
    assert summary["width"] == pytest.approx(2 * 1.645 * 0.15, rel=1e-2)


SHORT = {"engine": "trtllm", "isl": 1024 * RANDOM_RANGE_MEAN, "osl": 1024 * RANDOM_RANGE_MEAN}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"max_num_batched_tokens": 8192}),
        ({"engine": "sglang", "model": "deepseek-v3"}, {"max_prefill_tokens": 32768, "scheduler_recv_interval": 10}),
        ({"engine": "trtllm", "model": "gpt-oss-120b", "precision": "fp4"}, {"max_num_batched_tokens": 20000}),
        ({**SHORT, "model": "llama-3.1-70b"}, {"max_num_batched_tokens": 16384, "batch_wait_timeout_iters": 0}),
        ({**SHORT, "model": "llama-3.1-70b", "decode": Workers(4)}, {"batch_wait_timeout_iters": 20}),
        ({**SHORT, "model": "deepseek-v3", "version": "1.2.0rc6.post2"}, {"batch_wait_timeout_iters": 0}),
        (
            {**SHORT, "model": "deepseek-v3", "version": "1.2.0rc6.post2", "in_flight": 64.0},
            {"batch_wait_timeout_iters": 40, "batch_wait_max_tokens_ratio": 0.8},
        ),
        ({"drawn": False, "isl": 1000.0}, {"max_num_batched_tokens": 2508, "max_num_seqs": 8}),
    ],
)
def test_engines_are_set_as_scripts_of_their_source_say(changes: dict[str, Any], expected: dict[str, float]) -> None:
    row = replace(row_of("qwen3-32b", 8, 8.0), isl=900.0, drawn=True)
    assert expected.items() <= settings(replace(row, **changes), "blackwell").items()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_one_request_in_flight_waits_for_nothing(engine: str) -> None:
    """Its prompt is computed alone, and its decode steps one after another."""
    row = replace(row_of("qwen3-32b", 1, 1.0), engine=engine)
    means = simulated(row, LinearStepTime(overhead=0.01, per_token=1e-5), 1e5, "hopper")
    assert means.ttft == pytest.approx(0.01 + 1000 * 1e-5)
    assert means.tpot == pytest.approx(0.01 + 1e-5)


def test_the_format_of_the_cache_is_that_of_the_scripts_time() -> None:
    row = replace(row_of("minimax-m2.5", 8, 8.0, "b200_sxm"), drawn=True)
    caches = [script(replace(row, version=version), "blackwell").cache for version in ("0.17.0", "0.19.0")]
    assert caches == ["bf16", "fp8"]
    assert script(row, "hopper").cache == "bf16"


def test_a_number_in_flight_tells_the_deployment(tmp_path: Path) -> None:
    """The public configurations have 8,192 requests at one deployment alone, with drafts, and no 3,226."""
    public = {
        **APART, "backend": "trtllm", "system": "gb300", "backend_version": "0.8.1.post2", "isl": "1024",
        "osl": "1024", "prefill_tp_size": "4", "decode_tp_size": "8",
    }  # fmt: skip
    known, unknown = read(tmp_path, public | in_flight(8192), public | in_flight(3226) | {"silicon_ttft_ms": "600"})
    assert (known.layout, known.assumption) == ("3x dp4 ep + 2x dp8 ep", DRAFTS)
    assert unknown.refusal.startswith("no number of workers")


def test_prefill_workers_limit_a_disaggregated_loop(tmp_path: Path) -> None:
    """By Little's law a request takes at least its share of what prefill workers compute one after another."""
    busy = STATED | in_flight(2000)
    few, many = read(tmp_path, busy, busy | {"prefill_num_workers": "40", "silicon_ttft_ms": "6"})
    slow, fast = predict(few), predict(many)
    assert slow.ttft_shares["waiting"] > 0.5
    assert slow.ttft > 5 * fast.ttft
    assert slow.batch < fast.batch


def engine_row(tpot: float, workers: Workers, isl: float = 8192.0) -> Row:
    """Twenty requests in flight, each of which takes 1 s and 1,023 tokens."""
    return Row(
        "a", "vllm", "0.19", "h200_sxm", "deepseek-v3", "fp8", isl, 1024.0, False, 20.0, workers, None, 1.0, tpot
    )  # fmt: skip


def test_measured_deployments_that_meet_the_goals_at_the_rate_by_littles_law() -> None:
    question = Question("deepseek-v3", "h200", "long")
    assert question in questions()
    engine = engine_row(0.02, Workers(8))  # 20 / (1 + 1,023 x 0.02) = 0.93 requests/s, and 5 are asked for
    assert measured(question, [engine]) == 6 * 8
    assert measured(question, [engine, engine_row(0.02, Workers(4))]) == 6 * 4
    assert measured(question, [engine_row(0.051, Workers(8))]) is None  # a goal is missed
    assert measured(question, [engine_row(0.02, Workers(8), isl=1024.0)]) is None  # other lengths


def test_a_value_inside_and_one_outside_by_hand() -> None:
    """Widths of 2 · 1.645 · 0.1; the second value is missed by log 2 less half of that, which counts 20 times."""
    result = Comparison("two", fitted=False)
    result.add(1.0, 1.05, 0.1)
    result.add(1.0, 2.0, 0.1)
    summary = result.summary()
    assert summary["coverage"] == 0.5
    assert summary["width"] == pytest.approx(2 * REACH * 0.1)
    assert summary["score"] == pytest.approx(2 * REACH * 0.1 + 20 * (np.log(2.0) - REACH * 0.1) / 2)
    assert summary["median"] == pytest.approx((0.05 + 1.0) / 2)
    both = pooled([result, result])
    assert both.predicted == [1.05, 2.0, 1.05, 2.0]
    assert both.summary()["coverage"] == 0.5


def test_normal_errors_of_the_stated_deviation_are_covered_nine_times_of_ten() -> None:
    rng = np.random.default_rng(0)
    result = Comparison("normal", fitted=False)
    for deviation in rng.uniform(0.01, 0.3, 2000):
        result.add(1.0, float(np.exp(rng.normal(0, deviation))), float(deviation))
    assert result.summary()["coverage"] == pytest.approx(0.9, abs=0.02)


def test_the_page_shows_the_committed_results() -> None:
    document = json.loads(accuracy_page.RESULTS.read_text())["left_out"]
    text = accuracy_page.PAGE.read_text()
    printed_table = text.split(accuracy_page.BEGIN)[1].split(accuracy_page.END)[0].strip()
    assert printed_table == accuracy_page.table(document)
