"""What if: a changed question is answered as it would be on its own, beside the question itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.twin.planning.scenarios import document, kind, plan, question, simulations
from tests.twin.serving.scenarios import reported
from tests.twin.serving.scenarios import run as run_serving
from twin.planning.planner import Planner
from twin.planning.question import with_changes
from workloads.errors import BadInput
from workloads.trace import BlockStream, IdLists, Trace, thinned

SCENARIO = document(
    goals={"ttft_p90": "300ms", "tpot_p90": "40ms"},  # which fewer requests confirm than a 99th percentile
    vary={}, layouts=["colocated"], engines=[kind("one", 1, 2.0, 1.0)], limits={"engines": 4},
)  # fmt: skip


def test_a_changed_question_has_the_answer_that_it_has_alone(command) -> None:
    changes = ("--what", "rate=3x", "--what", "hit_rate=0.4")
    answer = command(SCENARIO, "--brief", "--json", "--no-figures", *changes)
    faster, cached = answer["what_if"]
    arrivals = {"process": "poisson", "rate": 120.0}
    alone = plan({**SCENARIO, "workload": {**SCENARIO["workload"], "arrivals": arrivals}})
    assert faster["what"] == "rate=3x"
    for field in ("name", "gpus", "cost_per_hour"):
        assert faster["recommendation"][field] == alone["recommendation"][field]
    assert faster["recommendation"]["gpus"] > answer["recommendation"]["gpus"]
    assert cached["recommendation"]["cost_per_hour"] <= answer["recommendation"]["cost_per_hour"]


def test_lengths_and_hit_rates_are_what_was_stated() -> None:
    base = question(SCENARIO)
    lengths, longer = base.lengths(), with_changes(base, "prompts=2x,answers=-50%").lengths()
    assert longer.prompts.mean() == pytest.approx(2 * lengths.prompts.mean(), rel=0.02)
    assert longer.answers.mean() == pytest.approx(0.5 * lengths.answers.mean(), rel=0.05)
    shared = with_changes(base, "hit_rate=0.3")
    sample = shared.lengths()
    assert sample.hits.cacheable.sum() / sample.prompts.sum() == pytest.approx(0.3, abs=0.03)
    np.testing.assert_array_equal(sample.prompts, lengths.prompts)
    assert shared.document["engine"]["enable_prefix_caching"]
    assert with_changes(shared, "hit_rate=0").lengths().hits is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour=2x", "expected rate, prompts or answers"),
        ("rate", "expected rate, prompts or answers"),
        ("rate=fast", "expected a rate, as 30, 2x or +50%"),
        ("rate=-100%", "expected a factor of 0.001 to 1000"),
        ("prompts=2", "expected a factor, as 2x or +50%"),
        ("hit_rate=20%", "expected a share of prompt tokens"),
        ("hit_rate=0.95", "expected at most 0."),
    ],
)
def test_bad_input_is_one_line(text: str, message: str, refused) -> None:
    assert f"--what: got '{text}', {message}" in refused(SCENARIO, "--what", text)


def test_the_lengths_of_a_trace_are_scaled_on_the_side_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:00:{i:02d}.0000000,{100 + i},{10 + i}\n" for i in range(40))
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    workload = {"trace": {"path": str(path)}, "arrivals": SCENARIO["workload"]["arrivals"]}
    base = question({**SCENARIO, "workload": workload})
    longer = with_changes(base, "prompts=2x")
    np.testing.assert_array_equal(longer.trace.prefill_tokens, 2 * base.trace.prefill_tokens)
    np.testing.assert_array_equal(longer.trace.decode_tokens, base.trace.decode_tokens)
    assert with_changes(base, "hit_rate=0.5").lengths().hits is not None


def test_a_hit_rate_is_that_of_simulated_caches() -> None:
    """A field of any workload: a warm engine's cache supplies this share of the prompt tokens."""
    scenario = {**SCENARIO, "workload": {**SCENARIO["workload"], "hit_rate": 0.3, "requests": 2000}}
    scenario["engine"] = scenario["engine"] | {"enable_prefix_caching": True}
    stated = {**scenario, "step_time": scenario["plan"]["engines"][0]["step_time"]}
    summary = reported(run_serving(stated), stated)["summary"]
    prompts = summary["prefill_tokens"] + summary["cached_tokens"]
    assert summary["cached_tokens"] / prompts == pytest.approx(0.3, abs=0.03)


def test_the_prefixes_of_a_trace_are_thinned_to_a_hit_rate() -> None:
    prompts = np.full(400, 64)
    ids = [(7, 8, 100 + i) if i % 2 else (1000 + 3 * i, 1001 + 3 * i, 1002 + 3 * i) for i in range(400)]
    trace = Trace("t", None, prompts, np.full(400, 4), IdLists.of(ids), 16)
    highest = 199 * 2 * 16 / (400 * 64)
    for share in (highest, 0.1, 0.0):
        stream = BlockStream()
        for blocks in thinned(trace, share).prompt_blocks(slice(None)):
            stream.add(blocks, 3)
        assert stream.infinite_hits() * 16 / (400 * 64) == pytest.approx(share, abs=0.005)
    with pytest.raises(BadInput, match=r"expected at most 0\.249"):
        thinned(trace, 0.3)


def test_a_hit_rate_is_refused_beside_prefixes() -> None:
    shared = {"prefixes": {"groups": 2, "tokens": 64}, "hit_rate": 0.1}
    with pytest.raises(BadInput, match="beside prefixes or sessions"):
        question({**SCENARIO, "workload": {**SCENARIO["workload"], **shared}})


def test_a_replayed_trace_is_planned_at_its_own_times(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    times = np.cumsum(rng.exponential(1 / 60, 600))
    rows = "".join(f"2023-11-16 18:00:{t:010.7f},200,16\n" for t in times if t < 59)
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    unlimited = document(vary={}, engines=[kind("one", 1, 2.0, 1.0)], layouts=["colocated"])
    replayed = question({**unlimited, "workload": {"trace": {"path": str(path)}, "arrivals": {"process": "replay"}}})
    assert replayed.rate is None
    assert replayed.load == pytest.approx(60, rel=0.15)
    answer = Planner(replayed, simulations(), brief=True).run().document()
    assert answer["feasible"]
    assert answer["question"]["rate"] is None
    assert len(answer["ledger"]) <= 12  # pools as large as the mean load needs, not all up to 64
