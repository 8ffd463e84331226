"""Fast-forwarded runs of serving systems equal step-by-step ones, to the last bit of every record and document."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.twin.serving.scenarios import answers, records, run, run_both_ways, scenario

LINK = {"bandwidth": 2e9, "latency": 1e-3, "bytes_per_token": 131072}


def check(document: dict[str, Any]) -> dict[str, Any]:
    """Compare the records and documents of both modes; returns the records."""
    fast, slow = run_both_ways(document)
    assert sum(log.events for log in fast.logs) <= sum(log.events for log in slow.logs)
    return records(fast)


def shared_prefixes(rate: float, limit: int | None) -> dict[str, Any]:
    """Short answers to prompts that begin alike, cut by `limit`."""
    return {
        "arrivals": {"process": "poisson", "rate": rate},
        "decode": {"distribution": "uniform", "low": 1, "high": 60},
        "max_tokens": limit,
        "prefixes": {"groups": 3, "tokens": 40, "cache_suffix": True},
    }


@given(
    rate=st.sampled_from([2.0, 15.0, 40.0, 200.0]), asynchronous=st.booleans(), limit=st.sampled_from([None, 12, 200]),
    blocks=st.sampled_from([20, 40, 400]), seats=st.sampled_from([2, 16, 64]), caching=st.booleans(),
    seed=st.integers(0, 10**6),
)  # fmt: skip
@example(rate=200.0, asynchronous=True, limit=200, blocks=20, seats=16, caching=False, seed=780924)
@example(rate=40.0, asynchronous=True, limit=200, blocks=20, seats=64, caching=True, seed=512919)
def test_one_engine(
    rate: float, asynchronous: bool, limit: int | None, blocks: int, seats: int, caching: bool, seed: int
) -> None:
    document = scenario(
        seed=seed,
        workload=shared_prefixes(rate, limit),
        engine={
            "num_gpu_blocks": blocks, "max_num_seqs": seats, "async_scheduling": asynchronous,
            "enable_prefix_caching": caching,
        },
    )  # fmt: skip
    assert sum(check(document)["output_tokens"]) == sum(answers(document))


@settings(max_examples=settings().max_examples // 3)
@given(
    scheduler=st.sampled_from(["sglang", "sglang", "tensorrt-llm"]), rate=st.sampled_from([15.0, 40.0, 200.0]),
    asynchronous=st.booleans(), limit=st.sampled_from([None, 12, 200]), blocks=st.sampled_from([20, 40, 400]),
    policy=st.sampled_from(["fcfs", "lpm"]), interval=st.sampled_from([1, 1, 7]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_other_schedulers(
    scheduler: str, rate: float, asynchronous: bool, limit: int | None, blocks: int, policy: str, interval: int,
    seed: int,
) -> None:  # fmt: skip
    """Decodes pause for prompts, and room that running sequences may need decides on admissions."""
    engine = {
        "scheduler": scheduler, "num_gpu_blocks": blocks, "max_num_seqs": 16, "block_size": 16,
        "async_scheduling": asynchronous, "scheduling_policy": policy, "enable_chunked_prefill": True,
        "scheduler_recv_interval": interval,
    }  # fmt: skip
    document = scenario(seed=seed, workload=shared_prefixes(rate, limit), engine=engine)
    assert sum(check(document)["output_tokens"]) == sum(answers(document))


TIES = {  # ties must not depend on the mode
    "workload": {"prefill": {"distribution": "fixed", "mean": 32}, "decode": {"distribution": "fixed", "mean": 16}},
    "step_time": {"per_token": 0.0, "per_kv_token": 0.0},
    "system": {"layout": "colocated", "replicas": 3},
}


@pytest.mark.parametrize("arrivals", [{"process": "closed_loop", "concurrency": 8}, {"rate": 62.5}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_clients_in_lockstep(arrivals: dict[str, Any], asynchronous: bool) -> None:
    workload = {**TIES["workload"], "arrivals": {"process": "deterministic"} | arrivals}
    check(scenario(**{**TIES, "workload": workload, "engine": {"async_scheduling": asynchronous}}))


def apart(decode: str) -> dict[str, Any]:
    """Prefill and decode apart."""
    return {
        "workload": {"models": {"count": 3, "zipf": 1.0}, "requests": 90},
        "system": {"layout": "disaggregated", "decode": decode, "decode_replicas": 2, "link": LINK},
    }


SECTIONS = {
    "isolated decode": apart("isolated"),
    "shared decode": apart("shared"),
    "ranks in lockstep": {"engine": {"data_parallel_size": 3, "num_gpu_blocks": 40}},
    **{
        routing: {"system": {"layout": "colocated", "replicas": 4, "routing": routing}}
        for routing in ("least_loaded", "power_of_two", "round_robin")
    },
}


@pytest.mark.parametrize("sections", SECTIONS.values(), ids=SECTIONS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_systems(sections: dict[str, Any], asynchronous: bool) -> None:
    engine = sections.get("engine", {}) | {"async_scheduling": asynchronous}
    check(scenario(**{**sections, "engine": engine}))


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    rate=st.sampled_from([2.0, 15.0, 60.0]), asynchronous=st.booleans(), blocks=st.sampled_from([20, 40, 400]),
    seats=st.sampled_from([2, 16]), latency=st.sampled_from([0.0, 1e-3]), ranks=st.sampled_from([1, 2]),
    seed=st.integers(0, 10**6),
    outages=st.lists(st.tuples(st.sampled_from(["prefill-0", "decode-1"]), st.floats(0.0, 3.0)), max_size=3),
)  # fmt: skip
@example(  # a reservation that is given up while a window is open
    rate=60.0, asynchronous=False, blocks=20, seats=16, latency=1e-3, ranks=1, seed=0, outages=[("prefill-0", 0.5)]
)  # fmt: skip
def test_caches_that_leave_with_chunks(
    rate: float,
    asynchronous: bool,
    blocks: int,
    seats: int,
    latency: float,
    ranks: int,
    seed: int,
    outages: list[tuple[str, float]],
) -> None:
    document = scenario(
        seed=seed,
        workload={"arrivals": {"process": "poisson", "rate": rate}},
        engine={
            "num_gpu_blocks": blocks, "max_num_seqs": seats, "async_scheduling": asynchronous,
            "max_num_batched_tokens": 16, "data_parallel_size": ranks,
        },
        system={
            "layout": "disaggregated", "prefill_replicas": 2, "decode_replicas": 2,
            "link": {**LINK, "latency": latency, "transfer": "with_chunks"},
        },
        failures=[{"engine": name, "at": at, "duration": 0.3} for name, at in outages],
    )  # fmt: skip
    assert sum(check(document)["output_tokens"]) == sum(answers(document))


@given(
    method=st.sampled_from(["draft_model", "ngram"]),
    drafts=st.sampled_from([{}, {"drafts": {"policy": "by_batch_size", "decodes": [2, 4], "drafts": [3, 1]}}]),
    acceptance=st.sampled_from([0.0, 0.6, 1.0]), rate=st.sampled_from([2.0, 15.0, 60.0]),
    limit=st.sampled_from([None, 12, 200]), blocks=st.sampled_from([20, 40, 400]), seats=st.sampled_from([2, 16]),
    caching=st.booleans(), tiers=st.booleans(), reservation=st.sampled_from(["chunk", "max_tokens"]),
    seed=st.integers(0, 10**6),
    outages=st.lists(st.tuples(st.sampled_from(["engine-0", "engine-1"]), st.floats(0.0, 3.0)), max_size=2),
)  # fmt: skip
def test_speculation(
    method: str,
    drafts: dict[str, Any],
    acceptance: float,
    rate: float,
    limit: int | None,
    blocks: int,
    seats: int,
    caching: bool,
    tiers: bool,
    reservation: str,
    seed: int,
    outages: list[tuple[str, float]],
) -> None:
    """Steps whose drafts are drawn before they have begun: cut by arrivals and failures, short of blocks, stopped."""
    proposed = {"proposed": 0.5} if method == "ngram" else {}
    document = scenario(
        seed=seed,
        workload=shared_prefixes(rate, limit),
        engine={
            "num_gpu_blocks": blocks, "max_num_seqs": seats, "enable_prefix_caching": caching or tiers,
            "kv_reservation": reservation,
            "speculative_config": {
                "method": method, "num_speculative_tokens": 3, "acceptance": acceptance, **proposed, **drafts,
            },
        },
        system={"layout": "colocated", "replicas": 2, "routing": "prefix_aware"},
        failures=[{"engine": name, "at": at, "duration": 0.3} for name, at in outages],
    )  # fmt: skip
    if tiers:
        document["engine"]["kv_offloading"] = {
            "bytes_per_token": 100.0, "host": {"capacity": 2e4, "bandwidth": 1e6}, "write_policy": "write_back",
        }  # fmt: skip
    assert sum(check(document)["output_tokens"]) == sum(answers(document))


def test_speculative_steps_are_passed_over() -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 3, "acceptance": 0.7}
    document = scenario(
        workload={"arrivals": {"process": "poisson", "rate": 1.0}, "decode": {"distribution": "fixed", "mean": 200}},
        engine={"speculative_config": config},
    )
    fast, slow = (sum(log.events for log in run({**document, "fast_forward": on}).logs) for on in (True, False))
    assert fast < slow / 4
