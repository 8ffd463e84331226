"""Plans of prompts that begin alike: hits of prefix caches count in capacities, and windows begin with warm caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.twin.planning.scenarios import SMALL, plan, planner, question
from twin.planning.family_estimates import estimate_families, horizon
from twin.planning.question import PrefixHits, prefix_hits
from twin.serving.run.simulation import Simulation
from workloads.mixes import SharedPrefixes
from workloads.request import Request
from workloads.trace import BlockStream


def shared(rate: float = 8.0, blocks: int = 40_000, **changes: Any) -> dict[str, Any]:
    """Prompts of 4,000 tokens of which 3,600 are one of twenty beginnings; a step takes 14 ms and 0.1 ms a row."""
    step = {"source": "linear", "overhead": 0.014, "per_token": 1e-4}
    engines = [{"name": "one", "device": {"type": "X", "count": 1}, "step_time": step}]
    return {
        **SMALL,
        "workload": {
            "prefill": {"distribution": "fixed", "mean": 4000},
            "decode": {"distribution": "geometric", "mean": 20},
            "arrivals": {"process": "poisson", "rate": rate},
            "prefixes": {"groups": 20, "tokens": 3600, "block_tokens": 400},
        },
        "engine": {"num_gpu_blocks": blocks, "max_num_batched_tokens": 2048},
        "plan": {"goals": {"ttft_p99": "300ms"}, "engines": engines, "window": 400, "replications": 4, **changes},
    }


def test_one_engine_is_enough_if_its_prefix_cache_is_warm() -> None:
    """A long simulation says so, of which only the first part has cold caches."""
    search = planner(shared())
    best = search.run().best
    assert best.candidate.gpus == 1
    document = search.evaluator(search.question).scenario(best.candidate, 8 * 600)
    run = Simulation(search.question.plan({**document, "measure": {}}), 0).run()
    ttft = np.array(run.columns.first_token) - np.array(run.columns.arrival)
    later = np.quantile(ttft[800:], 0.99)
    assert later < 0.3 < np.quantile(ttft[:200], 0.99)
    assert best.value(0) == pytest.approx(later, rel=0.15)


def test_no_candidate_that_a_warm_cache_serves_is_pruned_by_an_estimate() -> None:
    (family,), _ = estimate_families(question(shared()))
    engine = family.prefill
    assert engine.floor.capacity < 3 < 8 < engine.capacity <= engine.ceiling.capacity
    assert family.saturated(family.candidates[0], 8.0) is None
    # A goal between the time of a whole prompt and that of the part that is not shared is not out of reach.
    tight, refused = estimate_families(question(shared(goals={"ttft_p50": "200ms"})))
    assert (len(tight), refused) == (1, [])


def test_pools_are_large_enough_should_nothing_hit() -> None:
    """The prefixes do not fit in the caches' memory, so the pools that are tried reach what misses need."""
    search = planner(shared(blocks=700, goals={"ttft_p50": "10s"}))
    best = search.run().best
    assert search.families[0].prefill.supplied < 0.2
    assert best.candidate.gpus >= 3


def test_a_window_begins_when_caches_are_warm_and_the_queue_of_cold_ones_is_gone() -> None:
    cached = question(shared())
    families, _ = estimate_families(cached)
    lengths = horizon(cached, families)
    until_warm = families[0].prefill.requests_until_warm
    assert until_warm == pytest.approx(np.log(0.001) / np.log(0.95), rel=0.3)  # a beginning in 1,000 is still missing
    answers = lengths.warmup - until_warm / 8  # seconds of answers that began with the queue of cold caches
    assert 0.3 < answers < 5
    assert lengths.long == pytest.approx(400 + 8 * lengths.warmup, abs=8)  # so that 400 requests count nonetheless


def test_expected_hits_are_those_of_a_least_recently_used_cache() -> None:
    rng = np.random.default_rng(0)
    prefixes = SharedPrefixes(groups=50, tokens=64, block_tokens=16, zipf=0.8, cache_suffix=True)
    ids = list(prefixes.stream(rng)(np.full(3000, 129)))
    requests = [Request(i, float(i), 129, 4, prefix_blocks=blocks) for i, blocks in enumerate(ids)]
    hits = prefix_hits(requests, 16, prefixes)
    assert hits.cacheable.tolist() == [64] * 3000  # four of the eight full blocks
    stream = BlockStream()
    for blocks in ids:
        stream.add(blocks, len(blocks))
    for capacity in (40, 100, 300, 1000):
        expected = stream.lru_hits([capacity])[0] * 16 / hits.cacheable.sum()
        assert hits.share(capacity) == pytest.approx(expected, abs=0.03)
    assert hits.share(1e9) == pytest.approx(1.0, abs=0.02)  # the first of each beginning misses


def test_caches_are_warm_after_the_longest_distance_of_reuse_that_their_memory_spans() -> None:
    def of(*ids: int) -> PrefixHits:
        requests = [Request(i, float(i), 17, 1, prefix_blocks=(block,)) for i, block in enumerate(ids)]
        hits = prefix_hits(requests, 16, None)
        assert hits is not None
        return hits

    cycle = of(*range(5), *range(5), *range(5))
    assert cycle.settled(1e9) == 5
    assert (cycle.settled(3), cycle.share(3)) == (0, 0)  # each block is evicted before its next use
    assert of(*[7] * 9).settled(1e9) == 1


def test_prompts_that_share_nothing_have_no_hits() -> None:
    requests = [Request(i, float(i), 40, 4, prefix_blocks=(i,)) for i in range(10)]
    assert prefix_hits(requests, 16, None) is None


def test_pools_are_tried_that_a_tail_needs_far_beyond_the_load() -> None:
    """Prompts of 214 ms, and 400 ms for the 99th percentile: two engines bear the load, nine keep the waits short."""
    document = shared(rate=8.0)
    del document["workload"]["prefixes"]
    document["workload"]["prefill"]["mean"] = 2000
    document["plan"]["goals"] = {"ttft_p99": "400ms"}
    answer = plan(document)
    assert 7 < answer["recommendation"]["gpus"] < 12
