"""Pools of engines: every form of the `system` section comes to a list of them, and each has settings of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from scenarios.engine import PoolSpec
from scenarios.serving import check_scenario
from scenarios.system import LAYOUTS, SystemSpec
from tests.twin.serving.scenarios import records, reported, run, scenario
from twin.serving.plan.plan import ServingPlan, describe
from twin.serving.results.report import report_run
from twin.serving.run.simulation import Simulation
from twin.serving.system.system import System
from twin.serving.system.topologies import TOPOLOGIES, Parts
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

FILE = Path("s.yaml")
LINK = {"bandwidth": 1e9, "bytes_per_token": 1000}
FAST = {"source": "linear", "overhead": 0.001, "per_token": 1e-5}
MODELS = {"models": {"count": 3, "zipf": 1.0}, "prefill": {"distribution": "uniform", "low": 1, "high": 90}}


def plan(document: dict[str, Any], **settings: Any) -> ServingPlan:
    return prepare(document, FILE, [settings]).cases[0].plan


def pool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, **fields}


SHORT_AND_LONG = {
    "colocated": (
        {"layout": "colocated", "replicas": 2, "routing": "power_of_two"},
        {"pools": [pool("engine", replicas=2)], "routing": "power_of_two"},
    ),
    "isolated": (
        {"layout": "disaggregated", "prefill_replicas": 2, "link": LINK},
        {"pools": [pool("prefill", role="prefill", replicas=2), pool("decode", role="decode")], "link": LINK},
    ),
    "shared": (
        {
            "layout": "disaggregated", "decode": "shared", "decode_replicas": 3, "link": {**LINK, "shared": True},
            "decode_step_time": FAST,
        },
        {
            "pools": [
                pool("decode", role="decode", replicas=3, models="all", step_time=FAST), pool("prefill", role="prefill")
            ],
            "link": {**LINK, "shared": True},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("name", SHORT_AND_LONG)
def test_a_short_form_and_its_list_of_pools_are_the_same_system(name: str, models: int) -> None:
    short, long = SHORT_AND_LONG[name]
    documents = [
        scenario(workload={"models": {"count": models, "zipf": 1.0}}) | {"system": row} for row in (short, long)
    ]
    first, second = (run(document) for document in documents)
    assert records(first) == records(second)
    assert [engine.name for engine in first.engines] == [engine.name for engine in second.engines]
    assert list(first.links) == list(second.links)
    pools = [[entry.describe() for entry in plan(document).pools] for document in documents]
    assert pools[0] == pools[1]


def test_a_pool_has_the_settings_of_the_scenario_but_for_its_own() -> None:
    settings = {"max_num_seqs": 4, "kv_memory": {"memory": 2e10, "model": "llama-3.1-8b"}, "async_scheduling": True}
    pools = [pool("small", engine=settings), pool("large", replicas=2, step_time=FAST)]
    small, large = plan(scenario(engine={"max_table_blocks": 300}) | {"system": {"pools": pools}}).pools
    assert (small.scheduler.config.max_num_seqs, large.scheduler.config.max_num_seqs) == (4, 16)
    assert small.scheduler.config.num_gpu_blocks != large.scheduler.config.num_gpu_blocks == 400
    assert small.scheduler.config.max_table_blocks == large.scheduler.config.max_table_blocks == 300
    assert (small.scheduler.depth, large.scheduler.depth) == (2, 1)
    assert (small.step_time.decode_seconds(1, 1, 1, 1), large.step_time.decode_seconds(1, 1, 1, 1)) == (
        [0.004 + 2e-5 + 1e-6], [0.001 + 1e-5],
    )  # fmt: skip


def test_a_router_sees_every_pool_that_serves_the_model() -> None:
    pools = [
        pool("slow", replicas=2),
        pool("fast", step_time=FAST, models=["model-0"]),
        pool("spare", models=["model-2", "model-0"]),
    ]
    document = scenario(workload=MODELS) | {"system": {"pools": pools, "routing": "round_robin"}}
    planned = plan(document)
    assert planned.prefill_engines == {
        "model-0": ("model-0/slow-0", "model-0/slow-1", "fast-0", "spare-0"),
        "model-1": ("model-1/slow-0", "model-1/slow-1"),
        "model-2": ("model-2/slow-0", "model-2/slow-1", "spare-0"),
    }
    result = run(document)
    rows = result.columns.table()
    usage = {(model, name) for model, name in zip(rows["model"].tolist(), rows["replica"].tolist(), strict=True)}
    assert usage == {(model, name) for model, names in planned.prefill_engines.items() for name in names}
    assert len({engine.name for engine in result.engines}) == len(result.engines) == 8


def test_devices_and_what_they_cost() -> None:
    pools = [
        pool("prefill", role="prefill", device={"type": "H100", "count": 2, "price_per_hour": 3.0}),
        pool("decode", role="decode", models="all", replicas=4, device={"type": "A100", "price_per_hour": 1.5}),
    ]
    document = scenario(workload=MODELS) | {"system": {"pools": pools, "link": LINK}}
    planned = plan(document)
    devices = describe(planned)["devices"]
    assert devices == {"total": 10, "by_type": {"H100": 6, "A100": 4}, "cost_per_hour": 24.0}
    summary = report_run(run(document), planned)["summary"]
    tokens_an_hour = summary["output_throughput"] * 3600
    assert summary["cost_per_million_output_tokens"] == pytest.approx(24.0 / tokens_an_hour * 1e6)
    del pools[1]["device"]["price_per_hour"]
    assert describe(plan(document))["devices"] == {**devices, "cost_per_hour": None}
    assert "cost_per_million_output_tokens" not in report_run(run(document), plan(document))["summary"]
    del pools[1]["device"]
    assert describe(plan(document))["devices"] is None


def test_settings_reach_a_pool_by_its_name_or_number() -> None:
    document = scenario() | {"system": {"pools": [pool("a", replicas=2), pool("b")]}}
    changed = {"system.pools.b.replicas": 3, "system.pools.0.engine.scheduling_policy": "priority"}
    first, second = check_scenario(document, changed, FILE).pools
    assert (first.replicas, second.replicas) == (2, 3)
    assert (first.engine.scheduling_policy, second.engine.scheduling_policy) == ("priority", "fcfs")
    for key in ("system.pools.c.replicas", "system.pools.2.replicas"):
        message = rf"^--set: got '{key}', expected an item of the list \(a, b\), found '[c2]'$"
        with pytest.raises(BadInput, match=message):
            check_scenario(document, {key: 1}, FILE)


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ({"pools": [pool("a"), pool("a")]}, r"system.pools\[1\].name: got 'a', expected a name that no other pool has"),
        ({"pools": [pool("a", role="prefill")]}, "system.pools: expected pools of role both, or of prefill and decode"),
        ({"pools": [pool("a"), pool("b", role="decode")]}, "expected pools of role both, or of prefill and decode"),
        (
            {"pools": [pool("a", role="prefill"), pool("b", role="decode")]},
            "system.link: expected a link from prefill to decode engines",
        ),
        ({"pools": [pool("a")], "link": LINK}, "system.link: expected none, since pools have the role both"),
        ({"pools": [pool("a", models=["gpt"])]}, r"system.pools\[0\].models: got 'gpt', expected models of the work"),
        ({"pools": [pool("a", models=["model-1"])]}, "system.pools: expected a pool that serves model-0"),
        (
            {"pools": [pool("b", role="decode"), pool("a", role="prefill", models=["model-1"])], "link": LINK},
            "system.pools: expected a pool that serves model-0, for prefill",
        ),
        ({"pools": [pool("a", engine={"max_num_seqs": 100})]}, r"system.pools\[0\].engine: max_num_batched_tokens: "),
        ({"pools": [pool("a", replicas=10**5, engine={"data_parallel_size": 3})]}, "system: got 900000, expected at"),
        ({"pools": []}, "system.pools: "),
    ],
)
def test_pools_that_make_no_system_are_refused(system: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        plan(scenario(workload=MODELS) | {"system": system})


def test_a_plugin_adds_a_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    class PairsSpec(SystemSpec):
        """Two engines for each model, the second with half the slots."""

        layout: Literal["pairs"]

        def expand(self, engine: Any, step_time: Any) -> list[PoolSpec]:
            half = engine.model_copy(update={"max_num_seqs": engine.max_num_seqs // 2})
            return [
                PoolSpec(name=name, engine=row, step_time=step_time) for name, row in (("full", engine), ("half", half))
            ]

    def build(parts: Parts) -> System:
        parts.make_engines()
        return System(parts.env, parts.make_pools(parts.plan.prefill_engines), {}, {})

    monkeypatch.setitem(LAYOUTS, "pairs", PairsSpec)
    monkeypatch.setitem(TOPOLOGIES, "pairs", build)
    document = scenario() | {"system": {"layout": "pairs"}}
    result = run(document)
    assert [(engine.name, engine.max_num_seqs) for engine in result.engines] == [("full-0", 16), ("half-0", 8)]
    assert describe(plan(document))["scenario"]["system"] == {
        "layout": "pairs", "routing": "least_loaded", "kv_events": None, "autoscaling": None,
        "frontend": {"route": 0.0, "deliver": 0.0, "hand_over": 0.0},
    }  # fmt: skip
    with pytest.raises(BadInput, match=r"system.layout|system: "):
        run(scenario() | {"system": {"layout": "triples"}})


def test_pools_are_summarised_and_weighed_by_speed() -> None:
    """Speeds of 3 and 1, stated: the router counts with them, and the pools' parts sum to the whole."""
    document = scenario(
        system={
            "routing": "shortest_expected_delay",
            "pools": [
                {"name": "fast", "speed": 3, "device": {"type": "A", "price_per_hour": 2.0}},
                {"name": "slow", "speed": 1, "replicas": 2, "device": {"type": "B", "price_per_hour": 0.5}},
            ],
        }
    )
    summary = reported(run(document), document)["summary"]
    fast, slow = summary["pools"]["fast"], summary["pools"]["slow"]
    assert fast["requests"] + slow["requests"] == summary["requests"]
    assert fast["output_throughput"] + slow["output_throughput"] == pytest.approx(summary["output_throughput"])
    assert fast["requests"] > slow["requests"] / slow["engines"]
    assert (fast["cost_per_hour"], slow["cost_per_hour"]) == (2.0, 1.0)
    assert "pools" not in reported(run(scenario()), scenario())["summary"]


def test_a_speed_is_the_throughput_of_a_full_engine() -> None:
    """A step of 4 ms with 16 decodes of 10 µs each; prompts of 32 tokens in one chunk; answers of 21."""
    document = scenario(
        workload={"prefill": {"distribution": "fixed", "mean": 32}, "decode": {"distribution": "fixed", "mean": 21}},
        engine={"num_gpu_blocks": 10**6, "max_num_seqs": 16, "max_num_batched_tokens": 64},
        step_time={"source": "linear", "overhead": 0.004, "per_token": 1e-5, "per_kv_token": 0.0},
        system={"pools": [{"name": "one"}, {"name": "two", "engine": {"max_num_seqs": 8}}]},
    )
    engines = {engine.name: engine for engine in Simulation(plan(document)).system.engines}
    prompt = 0.004 + 32e-5
    assert engines["one-0"].speed == pytest.approx(53 / (prompt + 20 * (0.004 + 16e-5) / 16))
    assert engines["two-0"].speed == pytest.approx(53 / (prompt + 20 * (0.004 + 8e-5) / 8))
