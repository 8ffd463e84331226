"""Prefix-aware routing in simulated systems, with views of caches that are fresh or stale."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios.serving import ServingScenario
from tests.twin.serving.scenarios import records, run, run_both_ways, scenario
from workloads.errors import BadInput


def document(routing: Any, delay: float | None = None, **changes: Any) -> dict[str, Any]:
    """Twelve rubrics of three blocks over four engines whose caches hold half of them."""
    system = {"layout": "colocated", "replicas": 4, "routing": routing}
    return scenario(
        workload={
            "requests": 200,
            "arrivals": {"process": "poisson", "rate": 20.0},
            "prefill": {"distribution": "uniform", "low": 6, "high": 90},
            "prefixes": {"groups": 12, "tokens": 48, "block_tokens": 16},
        },
        engine={"num_gpu_blocks": 60, "async_scheduling": changes.pop("async_scheduling", False)},
        system=system if delay is None else system | {"kv_events": {"delay": delay}},
        **changes,
    )


def cached(*arguments: Any, **changes: Any) -> int:
    return sum(records(run(document(*arguments, **changes)))["cached_tokens"])


def test_more_of_the_prompts_is_found_in_the_caches() -> None:
    assert cached("prefix_aware") > 1.2 * cached("least_loaded")


def test_hashing_finds_as_much_without_looking_at_caches() -> None:
    assert cached({"policy": "consistent_hashing", "load_factor": 3.0}) > 1.2 * cached("least_loaded")


@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_events_without_delay_are_the_cache_itself(weight: float) -> None:
    routing = {"policy": "prefix_aware", "weight": weight}
    assert records(run(document(routing, 0.0))) == records(run(document(routing)))


def test_events_that_never_come_are_no_knowledge() -> None:
    """Every engine seems to have nothing cached, so the load decides, with the same turns."""
    assert records(run(document("prefix_aware", 1e9))) == records(run(document("least_loaded")))


def test_a_stale_view_finds_less() -> None:
    fresh, stale, older = (cached("prefix_aware", delay) for delay in (0.0, 2.0, 20.0))
    assert fresh > stale > older


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("delay", [0.0, 0.05, 1.0])
def test_what_it_sees_does_not_depend_on_fast_forwarding(asynchronous: bool, delay: float) -> None:
    failures = [{"engine": "engine-1", "at": 2.0, "duration": 1.5}]
    fast, slow = run_both_ways(document("prefix_aware", delay, async_scheduling=asynchronous, failures=failures))
    assert sum(log.events for log in fast.logs) < 0.9 * sum(log.events for log in slow.logs)


def test_sessions_stay_on_their_engines() -> None:
    workload = {
        "requests": 120,
        "prefill": {"distribution": "fixed", "mean": 40},
        "decode": {"distribution": "fixed", "mean": 8},
        "arrivals": {"process": "poisson", "rate": 2.0},
        "sessions": {
            "source": "drawn",
            "turns": {"distribution": "fixed", "mean": 6},
            "growth": {"distribution": "fixed", "mean": 24},
            "think": {"mean": 1.0},
        },
    }
    scenario_document = document("session_affinity") | {"workload": workload}
    table = run(scenario_document).request_table()
    engines_of: dict[int, set[str]] = {}
    for session, replica in zip(table["session"].tolist(), table["replica"].tolist(), strict=True):
        engines_of.setdefault(session, set()).add(replica)
    assert all(len(engines) == 1 for engines in engines_of.values())
    assert len(set.union(*engines_of.values())) == 4


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        ("longest", "expected one of least_loaded"),
        ({"policy": "longest"}, "expected one of least_loaded"),
        ({"policy": "round_robin", "weight": 2.0}, "expected parameters of round_robin: .*weight"),
        ({"policy": "prefix_aware", "wait": 2.0}, "expected parameters of prefix_aware: .*wait"),
        ({"policy": "prefix_aware", "weight": -1.0}, "greater than or equal to 0"),
        ({"weight": 1.0}, "(?i)field required"),
    ],
)
def test_what_is_no_router_is_refused(routing: Any, expected: str) -> None:
    with pytest.raises((BadInput, ValueError), match=expected):
        ServingScenario.model_validate(document(routing))
