"""Routers in one file: the longest cached prefix, and vLLM's rule for data-parallel engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schedulers.routing import ROUTERS, draws, reads_caches
from tests.twin.serving.scenarios import records, run, scenario

PLUGINS = [str(Path(__file__).parent / "plugins" / f"{name}.py") for name in ("longest_prefix", "fewest_requests")]


def document(routing: str, **engine: Any) -> dict[str, Any]:
    return scenario(
        plugins=PLUGINS,
        workload={
            "requests": 150,
            "arrivals": {"process": "poisson", "rate": 20.0},
            "prefill": {"distribution": "uniform", "low": 6, "high": 90},
            "prefixes": {"groups": 12, "tokens": 48, "block_tokens": 16},
        },
        engine={"num_gpu_blocks": 60, **engine},
        system={"layout": "colocated", "replicas": 4, "routing": routing},
    )


def test_more_of_the_prompts_is_found_in_the_caches() -> None:
    cached = {name: sum(records(run(document(name)))["cached_tokens"]) for name in ("round_robin", "longest_prefix")}
    assert cached["longest_prefix"] > 1.2 * cached["round_robin"]


@pytest.mark.parametrize("router", ["longest_prefix", "fewest_requests"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_it_sees_does_not_depend_on_fast_forwarding(router: str, asynchronous: bool, ranks: int) -> None:
    expected = document(router, async_scheduling=asynchronous, data_parallel_size=ranks)
    fast, slow = (run({**expected, "fast_forward": mode}) for mode in (True, False))
    assert records(fast) == records(slow)
    assert sum(log.events for log in fast.logs) < 0.9 * sum(log.events for log in slow.logs)


def test_counts_of_requests_keep_waits_short_where_turns_do_not() -> None:
    waits = {}
    for name in ("fewest_requests", "round_robin"):
        busy = document(name, max_num_seqs=2)
        busy["workload"]["arrivals"]["rate"] = 60.0
        columns = records(run(busy))
        waits[name] = sum(columns["scheduled"]) - sum(columns["arrival"])
    assert waits["fewest_requests"] < 0.8 * waits["round_robin"]


def test_a_router_says_whether_it_draws_and_reads_caches() -> None:
    run({**document("round_robin"), "workload": {**document("round_robin")["workload"], "requests": 1}})
    assert [name for name in ROUTERS if not draws(name)] == [
        "least_loaded", "round_robin", "prefix_aware", "session_affinity", "consistent_hashing",
        "weighted_least_loaded", "shortest_expected_delay", "fewest_requests",
    ]  # fmt: skip
    assert [name for name in ROUTERS if reads_caches(name)] == ["prefix_aware", "longest_prefix"]
