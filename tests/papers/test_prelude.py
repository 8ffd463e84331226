"""The Prelude reproduction: tables from three costs, lifetimes by meter, prefixes by closed form, and the claims."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from papers.prelude import lifetimes as prelude_lifetimes
from papers.prelude import prefixes as prelude_prefixes
from papers.prelude import reproduction as prelude
from papers.prelude.engines import (
    ENGINES,
    FITTED,
    FITTING,
    EngineCosts,
    SweepRow,
    decode_tasks,
    fit_share,
    fit_sweep,
    floor_seconds,
    split_costs,
    step_line,
    sweep_rates,
    sweep_rows,
    sweep_tasks,
)
from papers.prelude.lifetimes import Meter
from papers.prelude.prefixes import cold_job, cold_tokens
from papers.prelude.reproduction import figures as prelude_figures
from papers.prelude.reproduction import tables as prelude_table
from schedulers.engine_core import EngineCore
from tests.reports.rendering import lines_of
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

ROOT = Path(__file__).parents[2]
H200 = load_hardware("h200-sxm")


# -- what is printed ---------------------------------------------------------------------------------------------------


# -- the device --------------------------------------------------------------------------------------------------------


def test_the_floor_is_flops_for_long_prompts_and_bytes_for_short_ones() -> None:
    model = load_model("qwen3-4b")
    weights = 36 * (2560 * 128 * (32 + 8) * 2 + 3 * 2560 * 9728)
    head = 151_936 * 2560
    flops = 3 * (2 * weights * 512 + 36 * 4 * 32 * 128 * 512 * 513 / 2 + 2 * head)
    assert floor_seconds(model, H200, 3, 512) == pytest.approx(flops / 9.894e14)
    assert floor_seconds(model, H200, 1, 8) == pytest.approx(2 * (weights + head) / 4.8e12)
    overhead, per_token, per_kv_token = step_line(model, H200).values()
    assert overhead == pytest.approx(2 * (weights + head) / (0.8 * 4.8e12))
    assert per_token == pytest.approx(2 * weights / (0.6 * 9.894e14))
    assert per_kv_token == pytest.approx(36 * 2 * 8 * 128 * 2 / (0.8 * 4.8e12))


# -- Table 5 -----------------------------------------------------------------------------------------------------------


def test_a_lone_client_is_answered_after_a_step_and_its_own_time() -> None:
    costs = EngineCosts(client=0.0, host=0.0, overhead=0.005, per_prompt=0.006)
    assert sweep_rates(True, costs, 1, range(1)) == [pytest.approx(1 / 0.011)]
    slow = EngineCosts(client=0.003, host=0.004, overhead=0.005, per_prompt=0.006)
    rates = sweep_rates(True, slow, 1, range(8))
    error = 1.96 * 0.007 * 0.018**-2 / np.sqrt(200 * 8)  # of a mean of exponential times, through 1/x
    assert abs(np.mean(rates) - 1 / 0.018) < 2 * error


@pytest.mark.parametrize("one_shot", [True, False])
def test_at_saturation_a_request_costs_its_part_of_a_full_step(one_shot: bool) -> None:
    costs = EngineCosts(client=0.003, host=0.0, overhead=0.006, per_prompt=0.005)
    full = 16 / (0.006 + 16 * 0.005)  # 8192 tokens hold 16 prompts of 512
    (rate,) = sweep_rates(one_shot, costs, 96, range(1))
    assert rate == pytest.approx(200 / (13 * 0.006 + 200 * 0.005))  # 12.5 steps are 13, and none is idle
    assert rate < full


def test_a_fit_finds_the_costs_that_made_its_rows() -> None:
    true = split_costs(1 / 60, 0.003, 0.0061, 0.5)
    assert true.client + true.host + true.overhead + true.per_prompt == pytest.approx(1 / 60)
    assert true.overhead == pytest.approx(true.host)
    rows = [SweepRow(1, {"prelude": 60.0})] + [
        SweepRow(c, {"prelude": float(np.mean(sweep_rates(True, true, c, FITTING)))}) for c in (16, 96)
    ]
    costs, misfit = fit_share("prelude", rows, 0.003, 0.0038, 0.5)
    assert costs.per_prompt == pytest.approx(true.per_prompt, abs=4e-5)  # twice what the search stops at
    assert misfit < 0.01
    fit = fit_sweep("prelude", rows, 0.003, (1, 16, 96), (0.0, 0.5))
    assert fit["share"] == 0.5
    assert max(abs(row["error"]) for row in fit["rows"]) < 0.02


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def one_judge(name: str, prompt: int) -> tuple[Meter, Run]:
    """A single judge, metered."""
    document, settings = prelude_lifetimes.variant(name, "open", 1)
    judge = document["workload"]["tasks"][1] | {"prefill": {"distribution": "fixed", "mean": prompt}}
    document["workload"]["tasks"] = [judge]
    meter = Meter()
    run = Simulation(prepare(document, Path("one-judge"), [settings]).cases[0].plan, watch=meter).run()
    assert meter.judges == {0}
    return meter, run


def test_what_one_judge_holds() -> None:
    overhead, per_token, _ = step_line(load_model("qwen3-32b"), H200).values()
    step = overhead + 100 * per_token
    meter, _ = one_judge("one-shot", 100)
    assert (meter.block_seconds, meter.slot_seconds, meter.judge_peak) == (0, 0, 0)
    meter, _ = one_judge("decode-shaped", 100)
    assert meter.block_seconds == pytest.approx(7 * step)  # 100 tokens begin 7 blocks of 16
    assert meter.slot_seconds == pytest.approx(step)
    meter, _ = one_judge("judges as chats, answers reserved", 100)
    assert meter.judge_peak == -(-(100 + 4096 - 1) // 16)  # the last token is never cached
    assert meter.block_seconds == pytest.approx(meter.judge_peak * step)


def test_a_judge_too_long_for_a_step_holds_blocks_under_either_contract() -> None:
    shaped, _ = one_judge("decode-shaped", 3000)
    single, run = one_judge("one-shot", 3000)
    assert single.judge_peak == shaped.judge_peak == -(-3000 // 16)
    assert single.slot_seconds == 0
    assert len(run.logs[0].ends) == 2


# -- prefixes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_leader", [True, False])
@pytest.mark.parametrize(
    ("peers", "rubric", "budget"), [(1, 512, 8192), (5, 512, 8192), (30, 520, 4096), (9, 1000, 1200), (40, 64, 8192)]
)
def test_cold_tokens_are_those_of_the_closed_form(peers: int, rubric: int, budget: int, has_leader: bool) -> None:
    run = cold(peers, rubric, budget, has_leader)
    core = run.engines[0].core
    assert isinstance(core, EngineCore)
    assert core.prefill_tokens == cold_tokens(peers, rubric, 128, 16, budget, has_leader)
    assert core.prefill_tokens + core.cached_tokens == peers * (rubric + 128)


def test_a_leader_goes_one_step_ahead() -> None:
    overhead, per_token, _ = step_line(load_model("qwen3-4b"), H200).values()
    run = cold(4, 512, 8192, True)
    first = overhead + 640 * per_token
    assert sorted(run.columns.first_token) == [pytest.approx(seconds) for seconds in [first] + 3 * [
        first + overhead + 3 * 128 * per_token]]  # fmt: skip
    together = cold(4, 512, 8192, False)
    assert list(together.columns.first_token) == [pytest.approx(overhead + 4 * 640 * per_token)] * 4


def cold(peers: int, rubric: int, budget: int, has_leader: bool) -> Run:
    """Requests that arrive at once with one rubric, which is not in the cache yet."""
    document = cold_job(peers)
    document["workload"]["tasks"][0]["prefill"]["mean"] = rubric + 128
    document["workload"]["prefixes"]["tokens"] = rubric
    document["engine"] |= {
        "max_num_batched_tokens": budget,
        "one_shot": {"tokens": budget},
        "in_batch_prefix_caching": has_leader,
    }
    return Simulation(prepare(document, Path("cold")).cases[0].plan).run()


# -- examples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"), [("judges", prelude_lifetimes.scenario()), ("rubric", prelude_prefixes.scenario())]
)
def test_the_examples_are_the_scenarios(name: str, expected: dict[str, Any]) -> None:
    example = yaml.safe_load((ROOT / "examples" / f"prelude-{name}.yaml").read_text())
    for key, value in expected.pop("step_time").items():
        rounded = example["step_time"][key]
        assert rounded == (
            value if isinstance(value, str) else pytest.approx(value, rel=5e-3)
        )  # written to three digits
    del example["step_time"]
    assert example == expected


# -- all of it ---------------------------------------------------------------------------------------------------------


def test_the_whole_document_from_short_runs() -> None:
    messages: list[str] = []
    parts = {
        "sweep_all_rows": [],
        "sweep": sweep_tasks(FITTED, (1.0,)),
        "decode_control": decode_tasks(),
        "lifetimes": prelude_lifetimes.tasks(requests=150, replications=2),
        "prefixes": prelude_prefixes.tasks(requests=150, replications=2),
    }
    document = prelude.reproduce(1, messages.append, parts)
    assert len(messages) == sum(map(len, parts.values()))
    assert document["schema"] == "twin.reproduction-prelude/1"
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    check_table_5(document["sweep"])
    check_table_6(document["decode_control"])
    check_claims(document)
    check_what_is_shown(document)


def check_table_5(fits: list[dict[str, Any]]) -> None:
    assert [fit["engine"] for fit in fits] == list(ENGINES)
    for fit in fits:
        assert [row["published"] for row in fit["rows"]] == [row.rates[fit["engine"]] for row in sweep_rows()]
        for row in fit["rows"]:
            assert row["error"] == pytest.approx(row["predicted"] / row["published"] - 1)
            assert row["fitted"] == (row["concurrency"] in FITTED)


def check_table_6(predictions: list[dict[str, Any]]) -> None:
    assert [(prediction["engine"], prediction["held"]) for prediction in predictions] == [
        (e, h) for e in ENGINES for h in (False, True)
    ]
    for prediction in predictions:
        rows = {row["metric"]: row for row in prediction["rows"]}
        assert prediction["feasible"]
        assert abs(rows["tpot"]["error"]) < 0.01  # other random numbers than the fit's
        assert [name for name, row in rows.items() if row["fitted"]] == ["tpot"]
        gaps = rows["e2e"]["predicted"] - rows["ttft"]["predicted"]
        assert gaps == pytest.approx(31 * rows["tpot"]["predicted"])


def check_claims(document: dict[str, Any]) -> None:
    """Misses are reported, and a claim follows what was found."""
    claims = {(claim["where"], claim["what"]): claim for claim in document["claims"]}
    assert len(claims) == len(document["claims"])
    four, row = claims["Table 5", "prelude at c = 4"], document["sweep"][0]["rows"][1]
    assert four["published"] == "90.8 req/s"
    assert four["found"] == f"{row['predicted']:.1f} to {row['predicted']:.1f}"  # one share was tried
    assert four["agrees"] is False
    assert claims["section 4", "prelude: a lone client's P50 fits into its cycle"]["agrees"] is False
    assert claims["section 4", "vllm: a lone client's P50 fits into its cycle"]["agrees"] is True
    assert claims["Table 1", "one-shot work keeps no seat"]["agrees"] is True
    once = ("section 3", "a cold rubric is computed once, 4, 16, 64, 256 peers")
    assert claims[once]["agrees"] is True
    spoiled = copy.deepcopy(document)
    spoiled["prefixes"]["cold"][0]["runs"]["led"]["computed_tokens"] += 1
    assert {(entry["where"], entry["what"]): entry["agrees"] for entry in prelude.claims(spoiled)}[once] is False


def check_what_is_shown(document: dict[str, Any]) -> None:
    text = "\n".join(lines_of(prelude_table(document)))
    row = document["sweep"][0]["rows"][1]
    cells = next(line.split() for line in text.splitlines() if line.startswith("prelude    4 "))
    assert cells[2:6] == ["90.8", f"{row['predicted']:.1f}", f"{100 * row['error']:+.1f}", "%"]
    missed = text.split("What disagrees")[1]
    assert missed.count("\n- ") == sum(not claim["agrees"] for claim in document["claims"])
    figures = prelude_figures(document)
    assert set(figures) == {"sweep", "lifetimes"}
    for svg in figures.values():
        assert ET.fromstring(svg).tag.endswith("svg")
    assert prelude_figures(document) == figures
