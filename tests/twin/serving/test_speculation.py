"""Simulated speculation against its closed form, and against runs without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scenarios.serving import ServingScenario
from tests.twin.serving.scenarios import reported, run, scenario
from twin.serving.plan.plan import make_plan
from twin.serving.results.uncertainty import combine
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

FLAT = {"source": "linear", "overhead": 0.01, "per_token": 0.0, "per_kv_token": 0.0}


def speculating(**fields: Any) -> dict[str, Any]:
    return {"method": "draft_model", "num_speculative_tokens": 4, **fields}


def one_at_a_time(**engine: Any) -> dict[str, Any]:
    """Eighty answers of 200 tokens, one after the other, in steps of 10 ms that nothing lengthens."""
    return scenario(
        workload={
            "requests": 80,
            "arrivals": {"process": "closed_loop", "concurrency": 1},
            "prefill": {"distribution": "fixed", "mean": 10},
            "decode": {"distribution": "fixed", "mean": 200},
        },
        engine={"num_gpu_blocks": 400, "max_num_batched_tokens": 256, **engine},
        step_time=FLAT,
    )


@pytest.mark.parametrize("tokens", [1, 3, 5])
@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.9])
def test_tokens_a_step_are_those_of_the_closed_form(acceptance: float, tokens: int) -> None:
    """(1 − α^(k+1)) / (1 − α) tokens a step (Leviathan et al., equation 1), within four standard errors."""
    document = one_at_a_time(speculative_config=speculating(num_speculative_tokens=tokens, acceptance=acceptance))
    summary = reported(run(document), document)["summary"]["speculation"]
    expected = (1 - acceptance ** (tokens + 1)) / (1 - acceptance)
    lengths = np.arange(tokens + 1)
    chances = (1 - acceptance) * acceptance**lengths
    chances[-1] = acceptance**tokens
    deviation = np.sqrt(chances @ (lengths + 1.0) ** 2 - expected**2)
    # Drafts at the end of an answer are shorter: five steps of some eighty at the most.
    tolerance = 4 * deviation / np.sqrt(summary["num_drafts"]) + 0.03 * expected
    assert summary["mean_acceptance_length"] == pytest.approx(expected, abs=tolerance)


def test_latency_falls_as_steps_do() -> None:
    """Every draft right: 199 tokens in 40 steps of 10 ms. None right: as without speculation, to the last digit."""
    plain = one_at_a_time()
    never = one_at_a_time(speculative_config=speculating(acceptance=0.0))
    always = one_at_a_time(speculative_config=speculating(acceptance=1.0))
    without = reported(run(plain), plain)["summary"]
    assert reported(run(always), always)["summary"]["tpot"]["mean"] == pytest.approx(0.01 * 40 / 199)
    summary = reported(run(never), never)["summary"]
    for name in ("ttft", "tpot", "itl", "e2e", "steps", "duration"):
        assert summary[name] == without[name]


def test_verified_rows_and_the_draft_model_take_their_time() -> None:
    """One decode with four drafts: 10 ms, five rows of 1 ms, four passes of 2 ms."""
    document = one_at_a_time(
        speculative_config=speculating(
            acceptance=0.0, draft_step_time={"source": "linear", "overhead": 0.002, "per_token": 0.0}
        )
    )
    document["step_time"] = {"source": "linear", "overhead": 0.01, "per_token": 0.001, "per_kv_token": 0.0}
    document["workload"]["requests"] = 1
    times = run(document).logs[0].ends
    assert times[3] - times[2] == pytest.approx(0.01 + 5 * 0.001 + 4 * 0.002)


def test_a_request_has_the_same_luck_at_every_load() -> None:
    def accepted(concurrency: int) -> tuple[int, int]:
        document = one_at_a_time(speculative_config=speculating(acceptance=0.7))
        document["workload"]["arrivals"]["concurrency"] = concurrency
        summary = reported(run(document), document)["summary"]["speculation"]
        return summary["num_drafts"], summary["num_accepted_tokens"]

    assert accepted(1) == accepted(16)


def test_shares_by_position_and_by_model_are_those_that_are_counted() -> None:
    shares = [0.9, 0.5, 0.1]
    document = one_at_a_time(
        speculative_config=speculating(num_speculative_tokens=3, acceptance_by_position=shares, proposed=0.6)
    )
    summary = reported(run(document), document)["summary"]["speculation"]
    counts = np.array(summary["num_accepted_tokens_per_pos"]) / summary["num_drafts"]
    assert counts == pytest.approx(shares, abs=4 * 0.5 / np.sqrt(summary["num_drafts"]) + 0.01)
    steps = reported(run(document), document)["summary"]["steps"]
    assert summary["num_drafts"] / steps == pytest.approx(0.6, abs=4 * 0.5 / np.sqrt(steps) + 0.01)


@settings(max_examples=settings().max_examples // 2)
@given(st.booleans(), st.floats(0.0, 1.0), st.integers(1, 5), st.integers(0, 2**16), st.booleans())
def test_with_failures_transfers_and_little_memory_every_request_ends(
    apart: bool, acceptance: float, tokens: int, seed: int, fails: bool
) -> None:
    """`Simulation.run` checks that all requests finish and that every block is free; here, that answers are whole."""
    document = scenario(
        workload={
            "requests": 60,
            "arrivals": {"process": "poisson", "rate": 30.0},
            "prefill": {"distribution": "uniform", "low": 1, "high": 120},
            "decode": {"distribution": "geometric", "mean": 30},
        },
        engine={
            "num_gpu_blocks": 60,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "speculative_config": speculating(num_speculative_tokens=tokens, acceptance=acceptance),
        },
        step_time=FLAT,
        seed=seed,
    )
    system: dict[str, Any] = {"layout": "colocated", "replicas": 2}
    if apart:
        link = {"bandwidth": 1e9, "bytes_per_token": 1e5}
        system = {"layout": "disaggregated", "prefill_replicas": 1, "decode_replicas": 2, "link": link}
    document["system"] = system
    if fails:
        document["failures"] = [{"engine": "decode-0" if apart else "engine-0", "at": 0.7, "duration": 0.3}]
    plain = {**document, "engine": {k: v for k, v in document["engine"].items() if k != "speculative_config"}}
    assert sorted(lengths(document)) == sorted(lengths(plain))


def lengths(document: dict[str, Any]) -> list[tuple[int, int]]:
    columns = run(document).columns.table()
    return list(zip(columns["id"].tolist(), columns["output_tokens"].tolist(), strict=True))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"acceptance": 0.5, "acceptance_by_position": [0.5] * 4}, "either acceptance or"),
        ({"acceptance_by_position": [0.5, 0.6, 0.1, 0.1]}, "do not rise"),
        ({"acceptance_by_position": [0.5]}, "4 shares"),
        ({}, "acceptance_by_model of every model"),
        ({"acceptance": 0.5, "acceptance_by_model": {"moon": [0.5] * 4}}, "moon"),
        ({"acceptance": 0.5, "drafts": {"policy": "goodput"}}, "latency table"),
        ({"acceptance": 0.5, "drafts": {"policy": "by_batch_size", "decodes": [4], "drafts": [9]}}, "0 to 4"),
        ({"acceptance": 0.5, "drafts": {"policy": "lunar"}}, "fixed, by_batch_size, goodput"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], expected: str) -> None:
    document = one_at_a_time(speculative_config=speculating(**fields))
    with pytest.raises((BadInput, ValueError), match=expected):
        make_plan(ServingScenario.model_validate(document), Path(), None)


def measured(tmp_path: Path, answers: list[dict[str, list[int]]], **settings: Any) -> dict[str, Any]:
    """A section with a file of measured outcomes."""
    file = tmp_path / "outcomes.json"
    about = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    file.write_text(json.dumps({"schema": "twin.draft-outcomes/1", **about, "source": "a test", "answers": answers}))
    section = {"method": "ngram", "num_speculative_tokens": 4, "acceptance_profile": str(file)}
    return section | settings


def test_a_measured_answer_is_gone_through_position_by_position(tmp_path: Path) -> None:
    """40 tokens: 1 of the prompt's step; no drafts up to position 10, then 4 of which 3 are right."""
    answers = [{"drafted": [0] * 10 + [4] * 10, "right": [0] * 10 + [3] * 10}]
    document = one_at_a_time(speculative_config=measured(tmp_path, answers))
    document["workload"] |= {"requests": 3, "decode": {"distribution": "fixed", "mean": 40}}
    document["workload"]["arrivals"]["concurrency"] = 1
    summary = reported(run(document), document)["summary"]
    decodes = 9 + 8  # from 1 to 10 one token each; then 30 tokens, four at a time
    assert summary["steps"] == 3 * (1 + decodes)
    speculation = summary["speculation"]
    # The last draft is as short as the rest of the answer: 2 tokens, of which 1 may be right.
    assert speculation["num_drafts"] == 3 * 8
    assert speculation["num_decodes"] == 3 * decodes
    assert speculation["num_emitted_tokens"] == 3 * 39
    assert speculation["tokens_per_decode"] == pytest.approx(39 / decodes)
    assert speculation["num_draft_tokens"] == 3 * (7 * 4 + 1)
    assert speculation["num_accepted_tokens"] == 3 * (7 * 3 + 1)


def test_answers_are_drawn_evenly_and_other_draws_differ(tmp_path: Path) -> None:
    """Half of the answers have drafts that are right."""
    answers = [{"drafted": [4], "right": [4 * (i % 2)]} for i in range(10)]
    document = one_at_a_time(speculative_config=measured(tmp_path, answers))
    document["workload"]["requests"] = 200
    plan = prepare(document, tmp_path / "scenario.yaml").cases[0].plan
    rates = [reported(Simulation(plan, drafts=i).run(), document)["summary"]["speculation"] for i in range(4)]
    shares = [rate["num_accepted_tokens"] / rate["num_emitted_tokens"] for rate in rates]
    assert len(set(shares)) > 1
    assert shares[0] == pytest.approx(0.4, abs=0.06)  # 4 of 5 tokens, of half the requests


@pytest.mark.parametrize(
    ("answers", "settings", "expected"),
    [
        ([{"drafted": [0, 4], "right": [0]}], {}, "expected as many values of right"),
        ([{"drafted": [0, 2], "right": [0, 3]}], {}, "expected at most as many right tokens"),
        ([], {}, "answers"),
        ([{"drafted": [0], "right": [0]}], {"num_speculative_tokens": 5}, "num_speculative_tokens: got 4, expected at"),
        ([{"drafted": [0], "right": [0]}], {"acceptance": 0.5}, "beside acceptance_profile"),
    ],
)
def test_outcomes_that_cannot_be_used_are_refused(
    tmp_path: Path, answers: list[dict[str, list[int]]], settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises((BadInput, ValueError), match=expected):
        run(one_at_a_time(speculative_config=measured(tmp_path, answers, **settings)))


def test_metrics_in_lists_have_means_over_replications() -> None:
    runs = [{"per_pos": [4, 2], "tpot": {"mean": 1.0}}, {"per_pos": [6, 2], "tpot": {"mean": 3.0}}]
    mean, _ = combine(runs)
    assert mean == {"per_pos": [5, 2], "tpot": {"mean": 2.0}}
