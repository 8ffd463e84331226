"""Tiers below the device in simulated systems: times by hand, conservation under outages, and bounds of hit rates."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.twin.serving.scenarios import PLAIN, reported, run, run_both_ways, scenario
from twin.serving.results.summary import Run
from workloads.errors import BadInput

BYTES = 1000.0


def tier(nodes: int, bandwidth: float = 1e7, **changes: Any) -> dict[str, Any]:
    return {"capacity": nodes * 16 * BYTES, "bandwidth": bandwidth, **changes}


def offloading(host: int, disk: int = 0, **changes: Any) -> dict[str, Any]:
    result = {"bytes_per_token": BYTES, "host": tier(host, latency=1e-3), **changes}
    return result | ({"disk": tier(disk, 2e6)} if disk else {})


SESSIONS = {
    "requests": 90,
    "prefill": {"distribution": "uniform", "low": 20, "high": 120},
    "decode": {"distribution": "geometric", "mean": 12},
    "arrivals": {"process": "poisson", "rate": 8.0},
    "prefixes": {"groups": 9, "tokens": 48, "block_tokens": 16},
    "sessions": {
        "source": "drawn",
        "turns": {"distribution": "geometric", "mean": 5},
        "growth": {"distribution": "uniform", "low": 1, "high": 40},
        "think": {"mean": 0.5},
        "max_model_len": 500,
    },
}


def chats(engine: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Sessions on engines whose devices hold about two of them."""
    base = {**PLAIN["engine"], "num_gpu_blocks": 40, "max_num_seqs": 6}
    return {**scenario(engine=base | engine, **sections), "workload": SESSIONS}


SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.6}


def test_data_parallel_ranks_have_tiers_of_their_own() -> None:
    engine = {"kv_offloading": offloading(60), "data_parallel_size": 2}
    fast, _ = run_both_ways(chats(engine))
    assert len(fast.engines[0].cores) == 2
    assert all(core.kv_tiers is not None and core.kv_tiers.tiers[0].loaded for core in fast.engines[0].cores)


def test_what_is_loaded_is_not_computed() -> None:
    without, within = (run(chats(engine)) for engine in ({}, {"kv_offloading": offloading(2000)}))
    (off,), (on,) = ([engine.counters for engine in row.engines] for row in (without, within))
    assert on.cached_tokens > 1.5 * off.cached_tokens
    assert on.prefill_tokens < 0.8 * off.prefill_tokens


def two_prompts(tmp_path: Path, engine: dict[str, Any], replicas: int = 1) -> Run:
    """Prompts of 65 tokens on a device of 6 blocks: A, B, and at 10 s A again, on each of some engines in turn."""
    rows = [(second, ids) for second, ids in [(0, (1, 2, 3, 4)), (5, (5, 6, 7, 8)), (10, (1, 2, 3, 4))]]
    trace = tmp_path / "trace.jsonl"
    rows = [row for row in rows for _ in range(replicas)]
    trace.write_text(
        "".join(
            f'{{"chat_id": {number}, "parent_chat_id": -1, "timestamp": {second}, "input_length": 65, '
            f'"output_length": 1, "type": "text", "turn": 1, "hash_ids": {list(ids)}}}\n'
            for number, (second, ids) in enumerate(rows)
        )
    )
    document = scenario(
        engine={"num_gpu_blocks": 6, "max_num_batched_tokens": 65, **engine},
        system={"replicas": replicas, "routing": "round_robin"},
        step_time={"source": "linear", "overhead": 0.5, "per_token": 0.0, "per_kv_token": 0.0},
    )
    replay = {"process": "replay"}
    document["workload"] = {"trace": {"path": str(trace), "format": "bailian"}, "arrivals": replay}
    return run(document)


def test_a_load_takes_bytes_over_bandwidth_and_latency(tmp_path: Path) -> None:
    """B takes the device's last block, the blank one of A, and three of A's four blocks, from its end.

    Their 48 tokens of 1000 bytes over 10 MB/s take 4.8 ms, and 1 ms besides. A step takes half a second.
    """
    result = two_prompts(tmp_path, {"kv_offloading": offloading(100)})
    table = result.request_table()
    waits = (table["first_token"] - table["arrival"]).tolist()
    assert waits == pytest.approx([0.5, 0.5, 0.5058])
    assert table["cached_tokens"].tolist() == [0, 0, 64]


def test_engines_of_a_host_wait_for_its_link(tmp_path: Path) -> None:
    """Four engines load at once: those of one host come one after the other, those of another are as quick."""
    result = two_prompts(tmp_path, {"kv_offloading": offloading(100, engines_per_host=2)}, replicas=4)
    table = result.request_table()
    late = table["arrival"] == 10
    waits = sorted((table["first_token"] - table["arrival"])[late].tolist())
    assert waits == pytest.approx([0.5058, 0.5058, 0.5106, 0.5106])


def test_the_disk_takes_what_the_host_gives_up(tmp_path: Path) -> None:
    """The host holds one prompt. A comes from the disk, over its own link of 2 MB/s: 24 ms."""
    result = two_prompts(tmp_path, {"kv_offloading": offloading(4, 100)})
    table = result.request_table()
    assert (table["first_token"] - table["arrival"]).tolist() == pytest.approx([0.5, 0.5, 0.524])
    assert table["cached_tokens"].tolist() == [0, 0, 64]


def tiny_pools(
    blocks: int,
    host: int,
    disk: int,
    policy: str,
    eviction: str,
    shared: int,
    routing: str,
    delay: float,
    outages: list[tuple[int, float]],
    mode: str,
    blocks_on: str,
    seed: int,
) -> dict[str, Any]:
    return chats(
        {
            "num_gpu_blocks": blocks,
            "kv_offloading": {
                **offloading(host, disk, write_policy=policy, engines_per_host=shared),
                "host": tier(host, 3e5, eviction=eviction),
            },
            "async_scheduling": mode == "ahead",
            "speculative_config": SPECULATIVE if mode == "speculative" else None,
            "cache_blocks_on": blocks_on,
        },
        system={"replicas": 3, "routing": routing, "kv_events": {"delay": delay}},
        failures=[{"engine": f"engine-{engine}", "at": at, "duration": 0.5} for engine, at in outages],
        measure={"prefix_cache": True},
        seed=seed,
    )


documents = st.builds(
    tiny_pools,
    st.integers(33, 80), st.integers(1, 60), st.integers(0, 60), st.sampled_from(["write_through", "write_back"]),
    st.sampled_from(["lru", "cost_aware"]), st.integers(1, 3),
    st.sampled_from(["least_loaded", "prefix_aware", "session_affinity", "consistent_hashing"]),
    st.sampled_from([0.0, 0.05, 2.0]), st.lists(st.tuples(st.integers(0, 2), st.floats(0, 8)), max_size=5),
    st.sampled_from(["plain", "ahead", "speculative"]), st.sampled_from(["scheduled", "computed"]),
    st.integers(0, 1000),
)  # fmt: skip
# A block that steps of one window store in the host and evict from it goes on to the disk if it is complete by then.
WITHIN_A_WINDOW = [
    tiny_pools(33, 1, 1, "write_back", "lru", 1, routing, 0.0, [], "plain", "scheduled", 691)
    for routing in ("consistent_hashing", "least_loaded")
]


@example(WITHIN_A_WINDOW[0])
@example(WITHIN_A_WINDOW[1])
@settings(max_examples=settings().max_examples // 3)
@given(documents)
def test_tiny_pools_and_outages_lose_nothing(document: dict[str, Any]) -> None:
    """`Simulation` checks that all requests have ended and every block of the device is free; this the rest."""
    result, _ = run_both_ways(document)
    table = result.request_table()
    assert sorted(table["id"].tolist()) == list(range(90))
    turns: dict[int, list[tuple[float, float]]] = {}
    for session, arrival, last in zip(table["session"], table["arrival"], table["last_token"], strict=True):
        turns.setdefault(int(session), []).append((float(arrival), float(last)))
    for times in turns.values():
        times.sort()
        assert all(last <= arrival for (_, last), (arrival, _) in pairwise(times))
    for engine in result.engines:
        for core in engine.cores:
            core.check_integrity()
            assert not core.kv_tiers.loads
            assert not core.kv_tiers.orphans
            assert not any(block.pins for row in core.kv_tiers.tiers for block in row.blocks.values())
    summary = result.prefix_reuse.summary()
    if not document["failures"]:  # what is computed again after an outage is looked up twice
        assert summary["hit_rate"] <= summary["infinite"] + 1e-12
    assert summary["all"]["lru"] <= summary["all"]["belady"] + 1e-12 <= summary["infinite"] + 2e-12


def test_one_engine_and_tiers_without_end_come_up_to_the_infinite_cache() -> None:
    """One request at a time, so that each finds what all before it have left."""
    closed = {"workload": SESSIONS | {"arrivals": {"process": "closed_loop", "concurrency": 1}}}
    document = chats({"kv_offloading": offloading(5000)}, measure={"prefix_cache": True}) | closed
    summary = reported(run(document), document)["summary"]["prefix_cache"]
    assert summary["hit_rate"] == pytest.approx(summary["infinite"], abs=1e-12)
    assert summary["device"]["lru"] < summary["infinite"]


def test_the_summary_counts_what_was_copied() -> None:
    document = chats({"kv_offloading": offloading(50, 120)}, system={"replicas": 2})
    result = run(document)
    summary = reported(result, document)["summary"]
    host, disk = summary["kv_tiers"]["host"], summary["kv_tiers"]["disk"]
    for row, bandwidth in ((host, 1e7), (disk, 2e6)):
        assert row["loaded_bytes"] == row["loaded_tokens"] * BYTES > 0
        assert row["stored_bytes"] == row["stored_tokens"] * BYTES > 0
        assert row["load_utilization"] == pytest.approx(row["loaded_bytes"] / bandwidth / result.end / 2)
    assert summary["kv_load"]["p50"] > 1e-3
    assert "prefix_cache" not in summary
    plain = reported(run(chats({})), chats({}))["summary"]
    assert not {"kv_tiers", "kv_load"} & plain.keys()


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"kv_offloading": offloading(1) | {"host": tier(1) | {"capacity": 15999.0}}}, "host.capacity: expected room"),
        ({"kv_offloading": offloading(1), "enable_prefix_caching": False}, "expected enable_prefix_caching true"),
    ],
)
def test_tiers_that_keep_nothing_are_refused(engine: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        run(chats(engine))
