"""Integrity of tiny pools with everything on at once: routers, tiers, drafts, classes, shedding, scaling, failures."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.twin.serving.scenarios import records, reported, run, run_both_ways
from tests.twin.serving.test_autoscaling import DAY, POLICIES, QUICK, check_seconds
from tests.twin.serving.test_failures import outages
from tests.twin.serving.test_service_classes import tenants
from twin.serving.results.summary import Run

REQUESTS = 80

ENGINES = ["large-0", "large-1", "large-2", "small-0", "small-1"]

TIERS = st.sampled_from([
    None,
    {"host": {"capacity": 3e4, "bandwidth": 1e6}},
    {"host": {"capacity": 2e4, "bandwidth": 1e5}, "disk": {"capacity": 5e4, "bandwidth": 1e5}},
    {"host": {"capacity": 2e4, "bandwidth": 1e6}, "write_policy": "write_back"},
])  # fmt: skip

STEPS: st.SearchStrategy[dict[str, Any]] = st.sampled_from([
    {},
    {"async_scheduling": True},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.6, "proposed": 0.5}},
    {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2, "acceptance": 0.8}},
])  # fmt: skip

LIMITS = st.sampled_from([None, {"max_waiting": 3}, {"max_waiting_tokens": 300}, {"predicted_ttft": 2.0}])

ROUTERS = st.sampled_from(["prefix_aware", "session_affinity", "consistent_hashing", "least_loaded"])

ORDERS = st.sampled_from(["fcfs", "priority", "deadline", "fair"])


def check_blocks(result: Run) -> None:
    """All blocks of devices are free, and no tier holds more than it can."""
    for engine in result.engines:
        assert engine.is_idle
        assert engine.free_blocks == engine.blocks
        for core in engine.cores:
            core.check_integrity()
            if core.kv_tiers is not None:
                core.kv_tiers.check_integrity()


def everything(**engine: Any) -> dict[str, Any]:
    """Two pools for two models, with tenants of two classes who share prefixes."""
    document = tenants(
        workload={
            "requests": REQUESTS,
            "arrivals": {"process": "poisson", "rate": 150.0, **DAY},
            "prefixes": {"groups": 3, "tokens": 32, "cache_suffix": True},
            "models": {"count": 2, "zipf": 1.0},
        },
        engine={"max_num_seqs": 4, "enable_prefix_caching": True, **engine},
        system={
            "pools": [
                {"name": "large", "replicas": 1, "models": ["model-0"], "role": "both"},
                {"name": "small", "replicas": 1, "models": ["model-1"], "role": "both", "engine": {"max_num_seqs": 2}},
            ],
        },
    )  # fmt: skip
    return document


def scaled(policy: dict[str, Any]) -> dict[str, Any]:
    """Sections that scale both pools."""
    section = {"sync_period": 0.1, "start_up": {"warm_up": 0.2}, **QUICK, **policy}
    return {"large": {"max_replicas": 3, **section}, "small": {"max_replicas": 2, **section}}


@settings(max_examples=settings().max_examples // 3)
@given(
    st.sampled_from(POLICIES), outages(ENGINES), TIERS, STEPS, LIMITS, ROUTERS, ORDERS,
    st.sampled_from([16, 40, 200]), st.sampled_from([None, 0.02]), st.booleans(),
)  # fmt: skip
def test_every_request_ends_once_and_every_block_comes_back(
    policy: dict[str, Any], failures: list[dict[str, Any]], tiers: dict[str, Any] | None, steps: dict[str, Any],
    limits: dict[str, Any] | None, router: str, order: str, blocks: int, delay: float | None, retries: bool,
) -> None:  # fmt: skip
    document = everything(
        num_gpu_blocks=blocks, scheduling_policy=order, admission_control=limits,
        kv_offloading=tiers and {"bytes_per_token": 100.0, **tiers}, **steps,
    )  # fmt: skip
    if retries and limits:
        document["workload"]["retries"] = {"attempts": 2}
    document["system"] |= {"routing": router, "autoscaling": scaled(policy)}
    if delay is not None:
        document["system"]["kv_events"] = {"delay": delay}
    document["failures"] = failures
    result, _ = run_both_ways(document)
    shed = [] if result.shed is None else result.shed.ended
    ids = records(result)["id"]
    assert len(ids) == len(set(ids))
    assert len(ids) + len(shed) == REQUESTS
    check_blocks(result)
    check_seconds(result)


def test_each_part_has_something_to_do() -> None:
    """The scenarios above shed, preempt, draft, load from tiers, share prefixes, scale, and fail over."""
    document = everything(
        num_gpu_blocks=16, scheduling_policy="fair", admission_control={"max_waiting": 3},
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.6},
        kv_offloading={"bytes_per_token": 100.0, "host": {"capacity": 2e4, "bandwidth": 1e6}},
    )  # fmt: skip
    document["system"] |= {
        "routing": "prefix_aware", "kv_events": {"delay": 0.02},
        "autoscaling": scaled({"policy": "queue_length", "target": 2}),
    }  # fmt: skip
    document["failures"] = [{"engine": "large-0", "at": 0.3, "duration": 0.3}]
    result = run(document)
    summary = reported(result, document)["summary"]
    assert result.scaling is not None
    happened = {
        "shed": summary["shed"]["requests"],
        "preempted": summary["preemptions"],
        "accepted": summary["speculation"]["num_accepted_tokens"],
        "loaded": summary["kv_tiers"]["host"]["loaded_tokens"],
        "shared": summary["cached_tokens"],
        "started": sum(log.started for log in result.scaling),
        "failed over": int((result.columns.table()["attempts"] > 0).sum()),
    }
    assert all(happened.values()), happened
