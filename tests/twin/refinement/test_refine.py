"""`twin calibrate refine` against simulated engines, at other scores of their unknowns; scores from durations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from latency_models.io.config_io import read_yaml, write_yaml
from latency_models.sources.refined import RefinedSpec
from scenarios.reading import read_scenario
from tests.twin.refinement.conftest import ROOFLINE, plan_of, refine, short_run
from twin import cli
from twin.refinement.by_requests import simulate_requests
from twin.refinement.posterior import Observations, Posterior, estimate, log_mean_factor
from twin.refinement.question import Question
from twin.refinement.refine import Refinement
from twin.refinement.refine import refine as refinement
from twin.serving.run.simulation import realisation
from workloads.errors import BadInput

Refined = Callable[..., tuple[Any, str]]

TRUTH = {"whole_step": 1.2, "linear_kernels": -0.4}
STEP_LOG = (
    "experiment_id,workload,step.id,step_time_us,batch.num_prefill_reqs,batch.num_decode_reqs,batch.prefill_tokens,"
    "kv.usage_gpu_ratio,kv.blocks_total_gpu"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario, and a run of an engine whose steps take other times than it says."""
    folder = tmp_path_factory.mktemp("refine")
    (folder / "scenario.yaml").write_text(write_yaml(short_run(100, 12, (900, 0.8), (120, 0.5), max_num_seqs=32)))
    plan = plan_of(folder, **{"engine.max_num_seqs": 64})  # the engine's own setting, which its meta.json states
    times = simulate_requests(plan, TRUTH, 100)
    rows = [
        {
            "input_toks": request.prompt_tokens, "output_toks": min(answer, request.max_tokens),
            "arrival_time": 1e9 + start, "queued_ts": 50 + start, "first_token_ts": 50 + first,
            "last_token_ts": 50 + last,
        }
        for (request, answer), start, first, last in zip(
            realisation(plan, 0), times.start.tolist(), times.first.tolist(), times.last.tolist(), strict=True
        )
    ]  # fmt: skip
    write_run(folder / "run", rows[::-1])
    return folder


def write_run(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "meta.json").write_text(json.dumps({"engine_kwargs": {"max_num_seqs": 64, "seed": 42}}))


def read_run(folder: Path) -> list[dict[str, Any]]:
    """The requests of the run in order of arrival."""
    return [json.loads(line) for line in (folder / "run" / "requests.jsonl").read_text().splitlines()][::-1]


def slow_answers(folder: Path, name: str, requests: slice, factor: float) -> Callable[[bool], Refinement]:
    """What half of the run tells, the first or one spread over it, if some answers had taken `factor` times as long."""
    rows = read_run(folder)
    for row in rows[requests]:
        row["last_token_ts"] += (factor - 1) * (row["last_token_ts"] - row["first_token_ts"])
    write_run(folder / name, rows)
    source = folder / "scenario.yaml"
    scenario = read_scenario(source, "serving")
    return lambda spread: refinement(Question(source, scenario, {}, folder / name, 50, spread=spread))


def test_the_truth_is_found_and_the_rest_predicted(folder: Path, refined: Refined) -> None:
    document, notes = refined(folder, "--first", "30")
    assert "engine.max_num_seqs: 64, as the run's meta.json says" in notes
    assert document["settings"] == {"engine.max_num_seqs": 64}
    by_name = {unknown["name"]: unknown for unknown in document["unknowns"]}
    assert by_name["whole_step"]["verdict"] == "learned"
    assert abs(by_name["whole_step"]["score"] - TRUTH["whole_step"]) < 3 * by_name["whole_step"]["left"]
    for name in ("tpot.mean", "e2e.mean", "output_throughput"):
        row = document["rest"][name]
        assert abs(row["after_error"]) < 0.01 < abs(row["before_error"]), name
    low, high = document["rest"]["tpot.mean"]["interval"]
    assert low < document["rest"]["tpot.mean"]["measured"] < high


def test_the_engines_warm_up_is_not_learned(folder: Path, refined: Refined) -> None:
    """Whether the first seven requests were slow or not, the same is learned."""
    errors = []
    for seconds in (0.0, 0.15):
        rows = read_run(folder)
        for row in rows[:7]:
            row["first_token_ts"] += seconds
            row["last_token_ts"] += seconds
        write_run(folder / "cold", rows)
        document, notes = refined(folder, "--first", "30", run="cold")
        assert "the first 7 requests are left out as the engine's warm-up" in notes
        assert document["warm_up"] == 7
        errors.append([document["rest"][name]["after_error"] for name in ("ttft.mean", "tpot.mean", "e2e.mean")])
    assert errors[0] == errors[1]


def test_requests_spread_over_the_run_have_its_drift_in_both_parts(folder: Path) -> None:
    """An engine whose answers take a quarter longer in the second half of its run."""
    learn = slow_answers(folder, "drift", slice(50, None), 1.25)
    errors = {}
    for spread in (False, True):
        document = learn(spread).document
        assert (document["fitted"], document["held_out"]) == (50, 50)
        errors[spread] = abs(document["rest"]["tpot.mean"]["after_error"])
    assert errors[False] > 0.15
    assert errors[True] < 0.6 * errors[False]


def test_mean_steps_are_predicted_where_some_stall(tmp_path: Path) -> None:
    """The mean of further steps, over all that stalls may do, lies within the stated deviation of the prediction."""
    line = {"source": "linear", "overhead": 0.01, "per_token": 0.0004, "spread": 1.0}
    scenario = {"schema": "twin.scenario/1", "kind": "serving", "name": "stalls", "step_time": line,
                "workload": {"requests": 10, "prefill": {"distribution": "fixed", "mean": 60},
                             "decode": {"distribution": "fixed", "mean": 40},
                             "arrivals": {"process": "poisson", "rate": 4}},
                "engine": {"num_gpu_blocks": 4000, "max_num_seqs": 128}}  # fmt: skip
    source = tmp_path / "scenario.yaml"
    source.write_text(write_yaml(scenario))
    document = read_scenario(source, "serving")
    decodes = np.random.default_rng(0).integers(1, 100, 200)
    typical = 0.012 + 0.0006 * decodes
    true_mean = typical[100:].mean() * 1.6
    typical_errors = []
    for seed in range(4):
        seconds = np.where(np.random.default_rng(seed).random(200) < 0.2, 4.0, 1.0) * typical
        rows = [
            f"a,b,{step},{1e6 * duration},0,{count},0,{count * 10 / 4000},4000"
            for step, (duration, count) in enumerate(zip(seconds.tolist(), decodes.tolist(), strict=True), 1)
        ]
        (tmp_path / "steps.csv").write_text("\n".join([STEP_LOG, *rows]) + "\n")
        refined = refinement(Question(source, document, {}, tmp_path / "steps.csv", 100)).document
        predicted = (1 + refined["rest"]["step"]["after_error"]) * refined["rest"]["step"]["measured"]
        typical_errors.append(predicted / refined["mean_factor"]["factor"] / true_mean - 1)
        assert abs(np.log(predicted / true_mean)) < 1.96 * refined["mean_factor"]["deviation"]
    assert np.mean(typical_errors) < -0.1


def test_the_mean_of_tpot_is_learned_where_requests_stall(folder: Path) -> None:
    """An engine of which each eighth answer takes four times as long."""
    result = slow_answers(folder, "stalls", slice(None, None, 8), 4.0)(True)
    errors = result.document
    mean = errors["mean_factor"]
    assert abs(np.log1p(errors["fit"]["tpot.mean"]["after_error"])) < mean["deviation"]
    assert errors["rest"]["tpot.mean"]["interval"][0] < errors["rest"]["tpot.mean"]["measured"]
    assert mean["factor"] > 1.1
    steps = []
    for factor in (1.0, result.file["mean_factor"]):
        (folder / "stalled.yaml").write_text(write_yaml({"folder": ".", **result.file, "mean_factor": factor}))
        steps += RefinedSpec(source="refined", path="stalled.yaml").build(folder).decode_seconds(20, 20000, 1500, 1)
    assert steps[1] == pytest.approx(mean["factor"] * steps[0], rel=1e-4)


def test_a_fit_further_from_its_own_means_than_before_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, refined: Refined
) -> None:
    def wrong(*arguments: Any) -> Posterior:
        posterior = estimate(*arguments)
        return replace(posterior, estimate=posterior.estimate * -5)

    monkeypatch.setattr("twin.refinement.by_requests.estimate", wrong)
    document, notes = refined(folder, "--first", "30")
    assert "further from the means of its own requests than before" in notes
    assert {unknown["score"] for unknown in document["unknowns"]} == {0.0}
    assert document["rest"]["tpot.mean"]["after_error"] == document["rest"]["tpot.mean"]["before_error"]


def test_the_file_is_a_source_of_step_times_with_narrower_draws(folder: Path) -> None:
    assert refine(folder, "--first", "30") == 0
    scenario = folder / "scenario.yaml"
    settings = {"step_time": {"source": "refined", "path": str(folder / "refined.yaml")}}
    before, after = plan_of(folder), plan_of(folder, **settings)
    spread = [
        np.std([plan.step_time.draw(np.random.default_rng(i)).decode_seconds(20, 20000, 1500, 1) for i in range(60)])
        for plan in (before, after)
    ]
    assert spread[1] < 0.4 * spread[0]
    assert {unknown.basis for unknown in after.step_time.unknowns()} >= {"fitted", "held out"}
    question = Question(scenario, read_scenario(scenario, "serving"), settings, folder / "run", 30)
    (folder / "again.yaml").write_text(write_yaml({"folder": ".", **refinement(question).file}))
    again = RefinedSpec(source="refined", path="again.yaml").build(folder)
    assert [u.name for u in again.unknowns()] == [u.name for u in after.step_time.unknowns()]
    first, second = (model.decode_seconds(20, 20000, 1500, 1)[0] for model in (after.step_time, again))
    assert second == pytest.approx(first, rel=0.01)


def test_factors_that_hang_together_are_refused(folder: Path, refine_refusal) -> None:
    message = refine_refusal(folder, "--first", "30", "--factors", "whole_step,linear_kernels")
    assert "--factors: got 'linear_kernels', expected factors that the run tells apart" in message
    assert refine(folder, "--first", "30", "--factors", "whole_step") == 0


def test_the_result_of_vllms_benchmark_is_a_run(folder: Path, refined: Refined) -> None:
    rows = read_run(folder)[::-1]
    result = {
        "input_lens": [row["input_toks"] for row in rows],
        "output_lens": [row["output_toks"] for row in rows],
        "start_times": [row["queued_ts"] for row in rows],
        "ttfts": [row["first_token_ts"] - row["queued_ts"] for row in rows],
        "itls": [[row["last_token_ts"] - row["first_token_ts"]] for row in rows],
        "errors": [""] * len(rows),
    }
    (folder / "result.json").write_text(json.dumps(result))
    document, _ = refined(folder, "--first", "30", "--set", "engine.max_num_seqs=64", run="result.json")
    assert abs(document["rest"]["tpot.mean"]["after_error"]) < 0.01


def test_a_log_of_steps_is_a_run(folder: Path, refined: Refined, refine_refusal) -> None:
    model = plan_of(folder).step_time.vary(TRUTH)
    lines = [STEP_LOG]
    for step in range(1, 201):
        decodes = 4 + step // 4
        blocks = decodes * 40
        seconds = model.decode_seconds(decodes, blocks * 16, 640, 1)[0]
        lines.append(f"a,b,{step},{1e6 * seconds},0,{decodes},0,{blocks / 20000},20000")
    (folder / "steps.csv").write_text("\n".join(lines) + "\n")
    table = [f"{lines[0]},model", *(f"{line},qwen3-32b" for line in lines[1:])]
    (folder / "other.csv").write_text("\n".join(table) + "\n")
    message = refine_refusal(folder, "--first", "80", run="other.csv")
    assert "model: got 'qwen3-32b', expected a log of llama-3.1-8b, as the scenario's" in message
    document, _ = refined(folder, "--first", "80", run="steps.csv")
    assert document["kind"] == "steps"
    row = document["rest"]["step"]
    assert abs(row["after_error"]) < 0.02 < abs(row["before_error"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"input_toks": 3}', "requests.jsonl:1: got '{\"input_toks\": 3}', expected a JSON object with the numbers"),
        ('{"input_toks": 3, "output_toks": 2, "queued_ts": 2, "first_token_ts": 1, "last_token_ts": 3}',
         "requests.jsonl:1: expected queued_ts, first_token_ts and last_token_ts in this order"),
        ("", "requests.jsonl: expected at least one request"),
    ],
)  # fmt: skip
def test_bad_runs_are_one_line(folder: Path, tmp_path: Path, lines: str, message: str, refine_refusal) -> None:
    (tmp_path / "requests.jsonl").write_text(lines)
    error = refine_refusal(folder, run=str(tmp_path))
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--first", "101"), "--first: got 101, expected a number from 2 to 100"),
        (("--factors", "speed"), "--factors: got 'speed', expected some of"),
        (("--set", "step_time={source: linear, overhead: 0.01}"), "step_time.source: expected a source whose error"),
    ],
)
def test_bad_questions_are_one_line(folder: Path, words: tuple[str, ...], message: str, refine_refusal) -> None:
    assert message in refine_refusal(folder, *words)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("unknowns", ["nobody"], "unknowns[0]: got 'nobody', expected an unknown of the section"),
        ("covariance", [[-1.0]], "covariance: expected a symmetric matrix without negative eigenvalues"),
        ("estimate", [0.1, 0.2], "expected 1 scores, and 1 rows of 1 covariances"),
        ("step_time", {"source": "refined", "path": "refined.yaml"}, "step_time.path: got 'refined.yaml', expected an"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, field: str, value: object, message: str) -> None:
    document = {
        "schema": "twin.refined-step-time/1", "step_time": ROOFLINE, "unknowns": ["whole_step"], "estimate": [0.5],
        "covariance": [[0.1]], "drift": 0.01,
    }  # fmt: skip
    (tmp_path / "refined.yaml").write_text(write_yaml(document))
    spec = RefinedSpec(source="refined", path="refined.yaml")
    assert spec.build(tmp_path).unknowns()
    (tmp_path / "refined.yaml").write_text(write_yaml({**document, field: value}))
    assert read_yaml(tmp_path / "refined.yaml")
    with pytest.raises(BadInput, match=re.escape(message)):
        spec.build(tmp_path)


def test_a_scenario_of_another_gpu_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = {**read_yaml(folder / "scenario.yaml"), "step_time": {**ROOFLINE, "hardware": "l40s"}}
    (tmp_path / "scenario.yaml").write_text(write_yaml(elsewhere))
    command = ["calibrate", "refine", str(tmp_path / "scenario.yaml"), "--run", str(folder / "run"), "--first", "10"]
    assert cli.run([*command, "-o", str(tmp_path / "refined.yaml")]) == 2
    message = capsys.readouterr().err
    assert "times the predicted one: the run is likely of another GPU, model or split than the scenario" in message
    assert "check step_time.hardware (l40s), step_time.model (llama-3.1-8b)" in message
    assert refine(folder, "--first", "10") == 0
    assert "of another GPU" not in capsys.readouterr().err


Floats = NDArray[np.float64]


def observed(measured: Floats, begin: Floats | None = None, length: float = 0.5) -> Observations:
    begin = np.arange(len(measured), dtype=float) if begin is None else begin
    kinds = np.zeros(len(measured), dtype=np.int64)
    return Observations(measured, kinds, begin, begin + length, np.full(len(measured), 1e-4))


def linear(design: Floats, measured: Observations) -> Posterior:
    return estimate(measured, lambda s: (design @ s, design), design.shape[1])


def test_a_linear_model_has_the_closed_form() -> None:
    rng = np.random.default_rng(0)
    design, truth = 0.1 * rng.standard_normal((60, 3)), np.array([1.0, -0.5, 0.2])
    posterior = linear(design, observed(design @ truth + 0.02 * rng.standard_normal(60)))
    (noise, shared) = posterior.noise[0]
    covariance = np.linalg.inv(design.T @ design / (noise**2 + 1e-8) + np.eye(3))
    assert (noise, shared) == (pytest.approx(0.02, rel=0.35), pytest.approx(shared))
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-6)
    assert posterior.estimate == pytest.approx(truth, abs=0.3)
    assert [posterior.verdict(i) for i in range(3)] == ["learned"] * 3


def test_equal_columns_are_tied_and_an_absent_one_is_not_seen() -> None:
    rng = np.random.default_rng(1)
    column = rng.uniform(0.5, 1.5, 50)
    design = np.stack([0.04 * column, 0.04 * column, np.zeros(50), 0.1 * rng.standard_normal(50)], axis=1)
    posterior = linear(design, observed(design @ np.array([1.0, 1.0, 1.0, 1.0]) + 0.004 * rng.standard_normal(50)))
    assert [posterior.verdict(i) for i in range(4)] == ["tied", "tied", "not seen", "learned"]
    assert (posterior.tied(0), posterior.tied(1), posterior.tied(2)) == ([1], [0], [])
    assert posterior.estimate[:2].sum() == pytest.approx(2.0, abs=0.2)
    assert posterior.left[2] == pytest.approx(1.0)


def test_intervals_in_common_are_fewer_witnesses() -> None:
    """Sixty requests that were disturbed together say less than sixty others with residuals of that size."""
    rng = np.random.default_rng(2)
    begin = np.sort(rng.uniform(0, 100, 60))
    design = np.full((60, 1), 0.05)
    places = np.arange(0, 160)
    together: list[float] = []
    apart: list[float] = []
    for seed in range(40):
        noise = 0.05 * np.random.default_rng(seed).standard_normal(len(places))
        disturbed = np.array([noise[int(at) : int(at) + 40].mean() for at in begin])
        for length, misses in ((40.0, together), (1e-6, apart)):
            posterior = linear(design, observed(disturbed, begin, length))
            misses.append(float(posterior.estimate[0] / posterior.left[0]))
    assert np.std(apart) > 2.5
    assert np.std(together) < 1.5


def test_a_curved_model_is_found_by_several_steps() -> None:
    weights = np.linspace(0.5, 2.0, 40)

    def predict(scores: Floats) -> Floats:
        return np.log1p(weights * np.exp(0.8 * scores[0]))

    def linearise(scores: Floats) -> tuple[Floats, Floats]:
        odds = weights * np.exp(0.8 * scores[0])
        return np.log1p(odds), (0.8 * odds / (1 + odds))[:, None]

    measured = predict(np.array([1.7]))
    posterior = estimate(observed(measured + 1e-3 * np.random.default_rng(3).standard_normal(40)), linearise, 1)
    assert posterior.estimate[0] == pytest.approx(1.7, abs=0.02)
    assert posterior.rounds > 1


def test_the_factor_to_means_and_its_deviation_hold_for_spells_of_slow_steps() -> None:
    """Spells of ten steps of which a tenth take four times as long: neighbours are no independent witnesses."""
    rng = np.random.default_rng(4)
    steps = rng.uniform(0.01, 0.03, 2000)
    factors = [
        log_mean_factor(steps * np.repeat(np.where(rng.random(200) < 0.1, 4.0, 1.0), 10), steps * 4**0.1)
        for _ in range(300)
    ]
    errors, deviations = np.array(factors).T
    errors -= np.log(1.3 / 4**0.1)
    assert abs(errors.mean()) < 0.005
    assert np.mean(np.abs(errors) < 1.96 * deviations) > 0.93
