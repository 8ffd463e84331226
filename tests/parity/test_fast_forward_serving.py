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


def check_answers(document: dict[str, Any]) -> None:
    """Compare both modes, and the tokens of all answers."""
    assert sum(check(document)["output_tokens"]) == sum(answers(document))


limits, blocks, seeds = st.sampled_from([None, 12, 200]), st.sampled_from([20, 40, 400]), st.integers(0, 10**6)
MEMORY = {"num_gpu_blocks": 20, "async_scheduling": True}


@given(
    workload=st.builds(shared_prefixes, st.sampled_from([2.0, 15.0, 40.0, 200.0]), limits),
    engine=st.fixed_dictionaries({
        "num_gpu_blocks": blocks, "max_num_seqs": st.sampled_from([2, 16, 64]), "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.booleans(),
    }),
    seed=seeds,
)  # fmt: skip
@example(
    workload=shared_prefixes(200.0, 200), engine=MEMORY | {"max_num_seqs": 16, "enable_prefix_caching": False},
    seed=780924,
)  # fmt: skip
@example(
    workload=shared_prefixes(40.0, 200), engine=MEMORY | {"max_num_seqs": 64, "enable_prefix_caching": True},
    seed=512919,
)  # fmt: skip
def test_one_engine(workload: dict[str, Any], engine: dict[str, Any], seed: int) -> None:
    check_answers(scenario(seed=seed, workload=workload, engine=engine))


@settings(max_examples=settings().max_examples // 3)
@given(
    workload=st.builds(shared_prefixes, st.sampled_from([15.0, 40.0, 200.0]), limits),
    engine=st.fixed_dictionaries({
        "scheduler": st.sampled_from(["sglang", "sglang", "tensorrt-llm"]), "num_gpu_blocks": blocks,
        "max_num_seqs": st.just(16), "block_size": st.just(16), "async_scheduling": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "lpm"]), "enable_chunked_prefill": st.just(True),
        "scheduler_recv_interval": st.sampled_from([1, 1, 7]),
    }),
    seed=seeds,
)  # fmt: skip
def test_other_schedulers(workload: dict[str, Any], engine: dict[str, Any], seed: int) -> None:
    """Decodes pause for prompts, and room that running sequences may need decides on admissions."""
    check_answers(scenario(seed=seed, workload=workload, engine=engine))


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


def failing(*engines: str, max_size: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Outages of some of these engines."""
    outage = st.fixed_dictionaries(
        {"engine": st.sampled_from(engines), "at": st.floats(0.0, 3.0), "duration": st.just(0.3)}
    )
    return st.lists(outage, max_size=max_size)


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    rate=st.sampled_from([2.0, 15.0, 60.0]), latency=st.sampled_from([0.0, 1e-3]), seed=seeds,
    engine=st.fixed_dictionaries({
        "num_gpu_blocks": blocks, "max_num_seqs": st.sampled_from([2, 16]), "async_scheduling": st.booleans(),
        "data_parallel_size": st.sampled_from([1, 2]),
    }),
    outages=failing("prefill-0", "decode-1", max_size=3),
)  # fmt: skip
@example(  # a reservation that is given up while a window is open
    rate=60.0, latency=1e-3, seed=0, engine={"num_gpu_blocks": 20, "max_num_seqs": 16},
    outages=[{"engine": "prefill-0", "at": 0.5, "duration": 0.3}],
)  # fmt: skip
def test_caches_that_leave_with_chunks(
    rate: float, latency: float, seed: int, engine: dict[str, Any], outages: list[dict[str, Any]]
) -> None:
    link = {**LINK, "latency": latency, "transfer": "with_chunks"}
    document = scenario(
        seed=seed, workload={"arrivals": {"process": "poisson", "rate": rate}}, failures=outages,
        engine={"max_num_batched_tokens": 16, **engine},
        system={"layout": "disaggregated", "prefill_replicas": 2, "decode_replicas": 2, "link": link},
    )  # fmt: skip
    check_answers(document)


TIERS = {"bytes_per_token": 100.0, "host": {"capacity": 2e4, "bandwidth": 1e6}, "write_policy": "write_back"}


@given(
    workload=st.builds(shared_prefixes, st.sampled_from([2.0, 15.0, 60.0]), limits), seed=seeds,
    method=st.sampled_from([{"method": "draft_model"}, {"method": "ngram", "proposed": 0.5}]),
    drafts=st.sampled_from([{}, {"drafts": {"policy": "by_batch_size", "decodes": [2, 4], "drafts": [3, 1]}}]),
    acceptance=st.sampled_from([0.0, 0.6, 1.0]),
    engine=st.fixed_dictionaries({
        "num_gpu_blocks": blocks, "max_num_seqs": st.sampled_from([2, 16]),
        "kv_reservation": st.sampled_from(["chunk", "max_tokens"]),
    }),
    caching=st.sampled_from([
        {"enable_prefix_caching": False}, {"enable_prefix_caching": True},
        {"enable_prefix_caching": True, "kv_offloading": TIERS},
    ]),
    outages=failing("engine-0", "engine-1", max_size=2),
)  # fmt: skip
def test_speculation(
    workload: dict[str, Any], seed: int, method: dict[str, Any], drafts: dict[str, Any], acceptance: float,
    engine: dict[str, Any], caching: dict[str, Any], outages: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Steps whose drafts are drawn before they have begun: cut by arrivals and failures, short of blocks, stopped."""
    config = {"num_speculative_tokens": 3, "acceptance": acceptance, **method, **drafts}
    document = scenario(
        seed=seed, workload=workload, engine={**engine, **caching, "speculative_config": config}, failures=outages,
        system={"layout": "colocated", "replicas": 2, "routing": "prefix_aware"},
    )  # fmt: skip
    check_answers(document)


def test_speculative_steps_are_passed_over() -> None:
    config = {"method": "draft_model", "num_speculative_tokens": 3, "acceptance": 0.7}
    document = scenario(
        workload={"arrivals": {"process": "poisson", "rate": 1.0}, "decode": {"distribution": "fixed", "mean": 200}},
        engine={"speculative_config": config},
    )
    fast, slow = (sum(log.events for log in run({**document, "fast_forward": on}).logs) for on in (True, False))
    assert fast < slow / 4
