"""The regression on measured engine steps: made-up logs for exactness, the published one for accuracy."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.fitting.estimator import CannotFit, Floats
from latency_models.sources.vllm_step_log.spec import COEFFICIENTS, GRAPH_SIZES, StepRegression, VllmStepLogSpec
from latency_models.sources.vllm_step_log.step_log import StepLog, read_step_log
from latency_models.step_time import MeasuredDeployment, Origin, draw_scores
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence
from tests.latency_models.sources.conftest import present
from workloads.errors import BadInput
from workloads.request import Request

TRUE = (15e-3, 1.5e-3, 45e-6, 4e-8)

HEADER = (
    "experiment_id,workload,step.id,step_time_us,batch.num_prefill_reqs,batch.num_decode_reqs,batch.prefill_tokens,"
    "kv.usage_gpu_ratio,kv.blocks_total_gpu"
)


def steps(**columns: Any) -> StepLog:
    """Steps with these columns; the others are of one run, numbered from 0, far apart, without prompts."""
    count = len(next(iter(columns.values())))
    fields = {
        "run": np.full(count, "r"),
        "workload": np.full(count, "w"),
        "step": np.arange(count) * 10,
        "seconds": np.ones(count),
        **{name: np.zeros(count, dtype=np.int64) for name in ("prompts", "prompt_tokens", "decodes", "kv_tokens")},
    }
    return StepLog(**{**fields, **{name: np.asarray(column) for name, column in columns.items()}})


def columns(log: StepLog) -> dict[str, Any]:
    return {name: column for name, column in vars(log).items() if name != "origin"}


def padded(rows: int) -> int:
    return next((size for size in GRAPH_SIZES if size >= rows), rows)


def curve(rows: int) -> float:
    return float(np.log2(1 + padded(min(rows, 512)) / 8))


def made_up(count: int = 400, noise: float = 0.0, seed: int = 1) -> StepLog:
    """Steps that follow TRUE, prompts included, of a log that is not late."""
    rng = np.random.default_rng(seed)
    decodes, prompts = rng.integers(1, 600, count), np.where(rng.random(count) < 0.3, rng.integers(1, 900, count), 0)
    kv = decodes * rng.integers(100, 2000, count)
    overhead, per_doubling, per_prompt_token, per_kv = TRUE
    doublings = np.array([curve(row) for row in (decodes + prompts).tolist()])
    seconds = overhead + per_doubling * doublings + per_prompt_token * prompts + per_kv * kv
    seconds = seconds * (1 + noise * rng.standard_normal(count))
    return steps(
        seconds=seconds, decodes=decodes, prompts=(prompts > 0).astype(np.int64), prompt_tokens=prompts, kv_tokens=kv
    )


def batch(decodes: int, kv: int, chunks: Many[tuple[int, int]] = ()) -> Batch:
    sequence, running = Sequence(Request(0, 0.0, 1, 1), 0, False), cast("Many[Sequence]", range(decodes))
    pieces = [Chunk(sequence, tokens, context, True) for tokens, context in chunks]
    return MixedBatch(pieces, running, kv, kv) if pieces else DecodeBatch((), running, kv, kv)


def coefficients(model: StepRegression) -> list[float]:
    return [getattr(model, f"{name}_") for name in COEFFICIENTS]


def errors(model: StepRegression, log: StepLog) -> Floats:
    """Relative errors of predictions, without their signs."""
    return np.abs(model.predict(log) / log.seconds - 1)


def test_a_curve_with_stairs_is_found_exactly() -> None:
    model = StepRegression(late=False).fit(made_up())
    assert coefficients(model) == pytest.approx(TRUE, rel=1e-6)
    assert errors(model, made_up(seed=2)).max() < 1e-9


def test_stalled_steps_do_not_bend_the_line() -> None:
    log = made_up(noise=0.005)
    stalled = np.where(np.arange(len(log)) % 20 == 0, 3.0, 1.0)
    model = StepRegression(late=False).fit(steps(**{**columns(log), "seconds": log.seconds * stalled}))
    assert np.median(errors(model, made_up(seed=2))) < 0.003


def test_steps_pad_to_the_sizes_that_graphs_were_captured_for() -> None:
    model = StepRegression(late=False).fit(made_up())
    stairs = [model.seconds(batch(n, 0)) for n in (1, 3, 4, 5, 8, 9, 250, 257, 511, 513)]
    sizes = [1, 4, 4, 8, 8, 16, 256, 272, 512, 512]
    assert stairs == pytest.approx([TRUE[0] + TRUE[1] * np.log2(1 + size / 8) for size in sizes], rel=1e-6)
    plain = StepRegression(late=False, graph_sizes=()).fit(made_up())
    assert plain.curve_[9] == pytest.approx(np.log2(1 + 9 / 8))


@pytest.mark.slow
def test_the_covariance_is_what_repeated_fits_show() -> None:
    fits = [StepRegression(late=False).fit(made_up(200, noise=0.01, seed=seed)) for seed in range(30)]
    spread = np.std([coefficients(fit) for fit in fits], axis=0, ddof=1)
    claimed = np.mean([np.sqrt(np.diag(fit.covariance_)) for fit in fits], axis=0)
    assert spread / claimed == pytest.approx(1, abs=0.35)


def test_draws_scatter_as_the_covariance_says_and_stay_physical() -> None:
    model, rng = StepRegression(late=False).fit(made_up(noise=0.01)), np.random.default_rng(3)
    draws = np.array([coefficients(model.vary(of_the_fit(model, rng))) for _ in range(400)])
    centre, deviation = np.array(coefficients(model)), np.sqrt(np.diag(model.covariance_))
    assert (np.abs(draws.mean(axis=0) - centre) < 4 * deviation / 20).all()
    assert draws.std(axis=0) / deviation == pytest.approx(1, abs=0.15)
    assert (draws >= 0).all()
    again = StepRegression(late=False).fit(made_up(noise=0.01)).draw(np.random.default_rng(3))
    assert coefficients(again) == coefficients(model.draw(np.random.default_rng(3))) != coefficients(model)


def of_the_fit(model: StepRegression, rng: np.random.Generator) -> dict[str, float]:
    return {name: score for name, score in draw_scores(model.unknowns(), rng).items() if name.startswith("fit.")}


def test_draws_are_wider_in_another_workload_and_beyond_the_log() -> None:
    """Within the log the covariance says per mille; a workload is off by 1.5 %, and each doubling beyond by 5 %."""
    model, rng = StepRegression(late=False).fit(made_up(noise=0.01)), np.random.default_rng(5)
    draws = [model.draw(rng) for _ in range(200)]
    inside, beyond = batch(300, 300_000), batch(300, 4 * model.max_kv_tokens_)
    assert np.std([np.log(draw.seconds(inside)) for draw in draws]) == pytest.approx(0.015, rel=0.25)
    assert np.std([np.log(draw.seconds(beyond)) for draw in draws]) == pytest.approx(np.hypot(0.015, 2 * 0.05), rel=0.2)
    for draw in draws[:3]:
        one_by_one = [draw.seconds(batch(300, 4 * model.max_kv_tokens_ + 300 * i)) for i in range(4)]
        assert draw.decode_seconds(300, 4 * model.max_kv_tokens_, 10**6, 4) == one_by_one


def another_curve(seed: int, curvature: float = 0.6) -> StepLog:
    """Decodes of contexts alike, 650 tokens give or take 5 %, whose time bends otherwise than the fitted curve."""
    rng = np.random.default_rng(seed)
    decodes = rng.integers(16, 46, 400)
    kv = np.rint(decodes * 650 * (1 + 0.05 * rng.standard_normal(400))).astype(np.int64)
    seconds = 14e-3 + 3e-4 * decodes**curvature + 27e-9 * kv + 1e-4 * rng.standard_normal(400)
    return steps(seconds=seconds, decodes=decodes, kv_tokens=kv)


def straight(log: StepLog) -> float:
    """The price of a resident token by least squares on all steps."""
    features = np.array([[1.0, curve(rows), kv] for rows, kv in zip(log.decodes, log.kv_tokens, strict=True)])
    price: float = np.linalg.lstsq(features, log.seconds, rcond=None)[0][-1]
    return price


def test_what_the_curve_misses_is_not_taken_for_resident_tokens() -> None:
    """The line alone takes a token to cost nearly twice as much; its steps of equal rows say what one costs."""
    logs = [another_curve(seed) for seed in range(15)]
    fits = [StepRegression(late=False).fit(log) for log in logs]
    prices = np.array([fit.per_kv_token_ for fit in fits])
    assert np.mean([straight(log) for log in logs]) > 42e-9
    assert np.mean(prices) == pytest.approx(27e-9, rel=0.15)
    covered = np.abs(prices - 27e-9) < 1.645 * np.array([np.sqrt(fit.covariance_[3, 3]) for fit in fits])
    assert 0.8 <= covered.mean() <= 1.0


def test_equal_rows_say_nothing_where_none_are_equal() -> None:
    log = made_up(noise=0.01)
    distinct = log.where(np.isin(np.arange(len(log)), np.unique(log.decodes, return_index=True)[1]))
    model = StepRegression(late=False).fit(distinct.where(distinct.decode_only))
    assert model.per_kv_token_ == pytest.approx(TRUE[3], rel=0.05)


def test_prompts_that_were_never_logged_cost_a_row_give_or_take_a_factor_of_two() -> None:
    log = made_up(noise=0.01)
    model = StepRegression(late=False).fit(log.where(log.decode_only))
    assert not model.prompts_known_
    decodes = float(log.decodes[log.decode_only].mean())
    assert model.per_prompt_token_ == pytest.approx(model.per_doubling_ / (np.log(2) * (8 + decodes)))
    assert [unknown.name for unknown in model.unknowns()][-1] == "prompts"
    twice = model.vary({"prompts": 1.0})
    assert twice.per_prompt_token_ / model.per_prompt_token_ == pytest.approx(np.exp(0.7))


def test_coefficients_are_never_negative() -> None:
    decodes = np.arange(1, 101)
    model = StepRegression(late=False).fit(steps(decodes=decodes, kv_tokens=decodes**2, seconds=2.0 - 1e-3 * decodes))
    assert min(coefficients(model)) >= 0
    for name, variance in zip(COEFFICIENTS, np.diag(model.covariance_), strict=True):
        assert getattr(model, f"{name}_") > 0 or variance == 0
    assert min(coefficients(model.draw(np.random.default_rng(0)))) >= 0


FITTED = StepRegression(late=False).fit(made_up())


@given(decodes=st.integers(0, 700), kv=st.integers(0, 10**6), tokens=st.integers(1, 9000), context=st.integers(0, 9000))
def test_seconds_is_predict_to_the_last_bit(decodes: int, kv: int, tokens: int, context: int) -> None:
    row = steps(decodes=[decodes], kv_tokens=[kv + context + tokens], prompts=[1], prompt_tokens=[tokens])
    assert FITTED.seconds(batch(decodes, kv, [(tokens, context)])) == FITTED.predict(row)[0]


def test_parts_that_were_left_out_say_what_stalls_cost() -> None:
    """Stalls of 40 % in one step of eight: a step's interval holds 90 % of new ones, a run's the longer mean."""

    def stalling(seed: int) -> StepLog:
        log = made_up(noise=0.01, seed=seed)
        longer = np.where(np.random.default_rng(seed).random(len(log)) < 1 / 8, 1.4, 1.0)
        return steps(**{**columns(log), "seconds": log.seconds * longer})

    model, new = StepRegression(late=False).fit(stalling(1)), stalling(2)
    errors = np.log(new.seconds / model.predict(new))
    assert 0.85 <= (np.abs(errors) < 1.645 * model.scatter_).mean() <= 0.95
    (stalls,) = (unknown for unknown in model.unknowns() if unknown.name == "stalls")
    assert abs(np.log(new.seconds.sum() / model.predict(new).sum())) < 1.645 * (stalls.deviation or 0)
    assert model.vary({"stalls": 1.0}).seconds(batch(50, 5000)) == pytest.approx(
        model.seconds(batch(50, 5000)) * np.exp(model.stalls_)
    )
    quiet = StepRegression(late=False).fit(made_up(noise=0.01))
    assert quiet.stalls_ < 0.002
    assert quiet.scatter_ == pytest.approx(0.01, rel=0.2)


def test_a_log_says_whose_steps_it_has(tmp_path: Path) -> None:
    rows = [f"e,chat,{i},{15000 + 100 * i},0,{1 + i},0,0.{i:02d},1000,llama-2-70b,4" for i in range(30)]
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([f"{HEADER},model,tp", *rows]))
    model = VllmStepLogSpec(source="vllm_step_log", path=path.name).build(tmp_path)
    assert model.measured_deployment() == MeasuredDeployment(Origin("", "vllm", "", "llama-2-70b", 4), ranks=4)
    VllmStepLogSpec(source="vllm_step_log", path=path.name, model="meta-llama/Llama-2-70b-hf").build(tmp_path)
    with pytest.raises(BadInput, match=r"step_time.model: got 'qwen3-32b', expected llama-2-70b, whose steps were log"):
        VllmStepLogSpec(source="vllm_step_log", path=path.name, model="qwen3-32b").build(tmp_path)
    path.write_text("\n".join([f"{HEADER},model,tp", rows[0], rows[1].replace("llama-2-70b", "qwen3-32b")]))
    with pytest.raises(BadInput, match=r"steps.csv:3: model: got 'qwen3-32b', expected steps of one engine"):
        read_step_log(path)
    path.write_text("\n".join([HEADER, *(row.rsplit(",", 2)[0] for row in rows)]))
    assert VllmStepLogSpec(source="vllm_step_log", path=path.name).build(tmp_path).measured_deployment() is None


def test_a_late_log_times_the_batch_before() -> None:
    log = steps(
        #      decodes; a prompt of 50; its first token; decodes;  gap: a prompt; gap: a first token; gap: decodes
        step=[0, 1, 2, 3, 10, 20, 30],
        prompts=[0, 1, 1, 0, 2, 2, 0],
        prompt_tokens=[0, 50, 1, 0, 70, 2, 0],
        decodes=[7, 7, 7, 8, 9, 10, 11],
        kv_tokens=[70, 71, 72, 73, 74, 75, 76],
        seconds=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    )
    ran = log.executed()
    assert ran.seconds.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert ran.prompt_tokens.tolist() == [0, 0, 50, 0, 0, 0]
    assert ran.prompts.tolist() == [0, 0, 1, 0, 0, 0]
    assert ran.decodes.tolist() == [7, 7, 7, 8, 9, 11]
    assert ran.kv_tokens.tolist() == [70, 70, 71, 72, 74, 76]


def test_a_row_does_not_follow_one_of_another_run() -> None:
    log = steps(run=["a", "b"], step=[4, 5], decodes=[3, 9])
    assert log.executed().decodes.tolist() == [3, 9]


def test_a_split_is_by_place_in_each_run() -> None:
    log = steps(run=["a", "b", "a", "b", "a", "a"], decodes=[1, 2, 3, 4, 5, 6])
    first, later = log.split(0.5)
    assert (first.decodes.tolist(), later.decodes.tolist()) == ([1, 2, 3], [4, 5, 6])
    with pytest.raises(BadInput, match=r"share: got 1\.0, expected a share above 0 and below 1"):
        log.split(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"huber": 0.0}, r"huber: got 0\.0, expected a number above 0"),
        ({"graph_sizes": (4, 2)}, r"graph_sizes: got \(4, 2\), expected whole numbers above 0 that rise"),
        ({"graph_sizes": (0, 2)}, r"graph_sizes: got \(0, 2\), expected whole numbers above 0 that rise"),
    ],
)
def test_settings_out_of_range_are_told_at_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CannotFit, match=message):
        StepRegression(**settings).fit(made_up())


def test_what_cannot_be_fitted_is_told() -> None:
    with pytest.raises(CannotFit, match="steps: got 7, expected at least 8"):
        StepRegression().fit(made_up(7))
    with pytest.raises(CannotFit, match="steps: expected batches that differ, found one"):
        StepRegression().fit(steps(decodes=[5] * 20, kv_tokens=[50] * 20))


def written(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([HEADER, *rows]))
    return path


def test_a_log_is_read_in_seconds_and_tokens(tmp_path: Path) -> None:
    log = read_step_log(written(tmp_path, "e,chat,3,17500.5,1,20,90,0.25,1000", "e,chat,9,16000,0,21,0,0.5,1000"))
    assert log.seconds.tolist() == pytest.approx([17.5005e-3, 16e-3])
    assert log.kv_tokens.tolist() == [250 * 16, 500 * 16]
    assert (log.prompts.tolist(), log.prompt_tokens.tolist(), log.decodes.tolist()) == ([1, 0], [90, 0], [20, 21])
    assert (log.run.tolist(), log.workload.tolist(), log.step.tolist()) == (["e", "e"], ["chat", "chat"], [3, 9])
    assert log.decode_only.tolist() == [False, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("e,chat,4,0,0,1,0,0.1,10", r"steps.csv:3: step_time_us: got '0', expected a finite number above 0"),
        ("e,chat,4,9,0,-1,0,0.1,10", r":3: batch.num_decode_reqs: got '-1', expected a whole number of at least 0"),
        ("e,chat,4,9,0,1,0,1.5,10", r":3: kv.usage_gpu_ratio: got '1.5', expected a share from 0 to 1"),
        (
            "e,chat,3,9,0,1,0,0.1,10",
            r":3: step.id: got '3', expected steps that rise within a run \(the one before is 3\)",
        ),
    ],
)
def test_a_cell_that_will_not_do_is_told(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_step_log(written(tmp_path, "e,chat,3,9,0,1,0,0.1,10", row))


@pytest.fixture(scope="module")
def published() -> StepLog:
    return read_step_log(present("measured/vllm_0.15.1_h100_llama2_70b_steps.csv.gz"))


def test_later_steps_of_a_real_engine(published: StepLog) -> None:
    """Fitted on the first half of each run. Measured when this was written: 0.66 % for codegen, 0.77 % for general."""
    first, later = published.split(0.5)
    model = StepRegression().fit(first)
    for workload in ("codegen", "general"):
        selection = later.where(later.decode_only & (later.workload == workload))
        assert len(selection) > 100
        assert np.median(errors(model, selection)) < 0.02
    assert np.median(errors(model, later.executed())) < 0.02


def test_steps_of_twice_the_fitted_batch(published: StepLog) -> None:
    """Measured when this was written: 2.4 %, and 5.4 % with the price of a token from the whole line."""
    ran = published.executed()
    model = StepRegression(late=False).fit(ran.where(ran.decodes <= 45))
    query = ran.where(ran.decodes >= 90)
    assert len(query) >= 10
    assert np.median(errors(model, query)) < 0.04
    assert model.per_kv_token_ == pytest.approx(80 * 2 * 8 * 128 * 2 / 4 / 3.35e12, rel=0.4)


def test_the_published_log_is_one_step_late(published: StepLog) -> None:
    """Prompt tokens make no step of this log longer: what they cost stands in the row after."""
    first, _ = published.split(0.5)
    model = StepRegression().fit(first)
    with_prompts = first.where(first.prompt_tokens > first.prompts)
    assert with_prompts.prompt_tokens.max() > 500
    as_decodes = steps(
        **{**columns(with_prompts), "prompts": with_prompts.prompts * 0, "prompt_tokens": with_prompts.prompts * 0}
    )
    assert np.median(errors(model, as_decodes)) < 0.01 < 0.02 < np.median(errors(model, with_prompts))


def test_the_line_is_one_that_the_hardware_can_have(published: StepLog) -> None:
    """Weights, 138 GB over 4 GPUs, take no less than the bandwidth allows to be read, and no more than twice that."""
    model = StepRegression().fit(published.split(0.5)[0])
    assert 138e9 / 4 / 3.35e12 < model.overhead_ < 2 * 138e9 / 4 / 3.35e12
    a_token = 80 * 2 * 8 * 128 * 2 / 4 / 3.35e12  # layers, K and V, heads, dim, bytes
    assert 0.5 * a_token < model.per_kv_token_ < 4 * a_token
