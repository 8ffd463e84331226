"""Engines that fail, worked out by hand, and what is counted of them. Other tests take `outages` at any time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from scenarios.fields import MeasureSpec
from tests.twin.serving.scenarios import run, run_both_ways, scenario
from twin.serving.results.summary import engine_summaries, summarise

SLOW = {"bandwidth": 32 * 1000.0, "latency": 0.25, "bytes_per_token": 1000.0}  # a second for 32 tokens


def outages(engines: list[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(
        st.fixed_dictionaries(
            {
                "engine": st.sampled_from(engines),
                "at": st.floats(0.0, 3.0),
                "duration": st.sampled_from([1e-6, 0.01, 0.3, 2.0]),
            }
        ),
        max_size=8,
    )


# -- by hand -----------------------------------------------------------------------------------------------------------


def one_request(failures: list[dict[str, Any]], **system: Any) -> tuple[dict[str, list[Any]], Any]:
    """Prompt 32, answer 5, at 1.0: the prompt takes a step of 0.125 s, its cache 1 s and 0.25 s of latency, and each of
    four further tokens a step."""
    result = run(
        scenario(
            workload={
                "requests": 1,
                "prefill": {"distribution": "fixed", "mean": 32},
                "decode": {"distribution": "fixed", "mean": 5},
                "arrivals": {"process": "deterministic", "rate": 1.0},
            },
            step_time={"overhead": 0.125, "per_token": 0.0, "per_kv_token": 0.0},
            system={
                "layout": "disaggregated", "prefill_replicas": 2, "decode_replicas": 1, "link": SLOW, **system
            },
            failures=failures,
        )
    )  # fmt: skip
    table = {name: values.tolist() for name, values in result.columns.table().items()}
    start = table["arrival"][0]
    times = {name: [row - start for row in table[name]] for name in ("first_token", "last_token")}
    return table | times, result


def failure(start: float, engine: str, at: float, duration: float) -> dict[str, Any]:
    return {"engine": engine, "at": start + at, "duration": duration}


START = 1.0
"""When the only request comes."""


def test_nothing_fails() -> None:
    table, _ = one_request([])
    assert table["arrival"] == [START]
    assert (table["first_token"], table["last_token"]) == ([0.125], [0.125 + 1.25 + 4 * 0.125])
    assert (table["attempts"], table["output_tokens"]) == ([0], [5])


def test_a_cache_on_its_way_is_lost_with_its_engine_and_computed_elsewhere() -> None:
    """Half of the cache has gone at 0.625. The other prefill engine computes the prompt until 0.75 and sends it all."""
    table, result = one_request([failure(START, "prefill-0", 0.625, 0.5)])
    assert (table["first_token"], table["last_token"]) == ([0.125], [0.75 + 1.25 + 4 * 0.125])
    assert (table["attempts"], table["output_tokens"], table["replica"]) == ([1], [5], ["decode-0"])
    assert {name: (link.moved, link.sent) for name, link in result.links.items()} == {
        "prefill-0": (16_000.0, 0), "prefill-1": (32_000.0, 1),
    }  # fmt: skip


def test_a_cache_that_has_gone_arrives_although_its_engine_fails() -> None:
    table, _ = one_request([failure(START, "prefill-0", 1.25, 5.0)])
    assert (table["last_token"], table["attempts"]) == ([1.875], [0])


def test_an_engine_is_back_when_its_last_outage_is_over() -> None:
    """The second outage ends at 0.875 within the first, which lasts until 1.125."""
    pair = [failure(START, "prefill-0", 0.625, 0.5), failure(START, "prefill-0", 0.75, 0.125)]
    table, _ = one_request(pair, prefill_replicas=1)
    assert (table["last_token"], table["attempts"]) == ([1.125 + 0.125 + 1.25 + 0.5], [1])


@pytest.mark.parametrize("at", [1.375, 1.4375, 1.5])
def test_a_decode_engine_that_fails_has_its_answers_computed_anew(at: float) -> None:
    """Decoding began at 1.375. At 1.5 the second token has come or is lost with its step: it ends at that instant."""
    table, _ = one_request([failure(START, "decode-0", at, 1.0)])
    assert table["output_tokens"] == [5]
    assert table["attempts"] == [1 if at > 1.375 else 0]


# -- counters ----------------------------------------------------------------------------------------------------------


def counters(result: Any) -> dict[str, int]:
    summary = summarise(result, MeasureSpec())
    return {name: summary[name] for name in ("prefill_tokens", "cached_tokens", "preemptions")}


BUSY = scenario(
    workload={"requests": 80, "prefixes": {"groups": 3, "tokens": 40, "cache_suffix": True}},
    engine={"num_gpu_blocks": 24},
)
"""One engine whose blocks run out and whose prompts share prefixes, so that every counter counts."""


def test_counters_survive_an_outage_after_the_last_answer() -> None:
    """Every request has been answered when the engine fails, so nothing that it counted may change."""
    calm = run(BUSY)
    assert all(count > 0 for count in counters(calm).values())
    failing = run({**BUSY, "failures": [{"engine": "engine-0", "at": calm.end + 1, "duration": 1.0}]})
    assert counters(failing) == counters(calm)
    assert engine_summaries(failing) == engine_summaries(calm)


@pytest.mark.parametrize("ranks", [1, 2])
def test_counters_add_up_over_outages(ranks: int) -> None:
    """Prompt tokens scheduled are those of all steps that ended, and of the one that each outage broke off."""
    failures = [{"engine": "engine-0", "at": at, "duration": 0.1} for at in (0.4, 1.0, 1.6)]
    document = {**BUSY, "engine": {**BUSY["engine"], "data_parallel_size": ranks}, "failures": failures}
    result, slow = run_both_ways(document)
    computed, counts = sum(result.logs[0].prefill_tokens), counters(result)
    assert computed <= counts["prefill_tokens"] <= computed + ranks * len(failures) * 64
    assert counts == {name: engine_summaries(result)[0][name] for name in counts}
    assert counts == counters(slow)


def test_a_request_keeps_the_preemptions_of_the_engine_that_failed_under_it() -> None:
    """Whatever the schedulers took away was taken from requests: both sides count the same."""
    failures = [{"engine": "engine-0", "at": at, "duration": 0.1} for at in (0.4, 0.7, 1.0, 1.3, 1.6)]
    result = run({**BUSY, "failures": failures})
    assert sum(result.columns.preemptions) == counters(result)["preemptions"] > 0
