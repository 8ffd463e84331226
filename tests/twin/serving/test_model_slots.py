"""Engines that keep models in slots, simulated: step times by hand, fast-forwarding, memory, the five strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latency_models.deployment.model_config import TARGET_MODULES, adapter_bytes
from latency_models.deployment.models import load_model
from tests.twin.serving.scenarios import plan_for, records, run, run_both_ways, scenario
from twin.serving.plan.plan import ServingPlan
from twin.sweeps.serving_sweep import prepare
from workloads.errors import BadInput

ALL = {"layout": "pools", "pools": [{"name": "engine", "models": "all", "replicas": 2}]}
LORA: dict[str, Any] = {
    "max_loras": 2, "adapter_bytes": 1e8, "load": {"bandwidth": 1e10, "latency": 0.001},
    "cost": {"step": 0.001, "adapter": 0.0005, "row": 1e-5, "row_rank": 1e-6},
}  # fmt: skip
SWAPPING: dict[str, Any] = {"resident": 1, "weight_bytes": 1e9, "load": {"bandwidth": 1e10}}
MEMORY = {"memory": 85899345920, "model": "llama-3.1-8b"}
FLEET: dict[str, Any] = {
    "engines": 4, "lora": LORA, "swapping": SWAPPING,
    "link": {"bandwidth": 1e11, "bytes_per_token": 131072},
    "quantised_step_time": {"source": "linear", "overhead": 0.002},
}  # fmt: skip


def plan_of(document: dict[str, Any]) -> ServingPlan:
    return plan_for(document)


@settings(max_examples=settings().max_examples // 2)
@given(
    engine=st.sampled_from([{"lora_config": LORA}, {"weight_swapping": SWAPPING}]),
    rate=st.sampled_from([5.0, 40.0, 150.0]),
    asynchronous=st.booleans(),
    models=st.sampled_from([1, 3, 6]),
    keep_alive=st.sampled_from([None, 0.05]),
    turn=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 10**6),
)
def test_fast_forwarding_changes_nothing(
    engine: dict[str, Any], rate: float, asynchronous: bool, models: int, keep_alive: float | None, turn: float,
    seed: int,
) -> None:  # fmt: skip
    if "weight_swapping" in engine:
        engine = {"weight_swapping": SWAPPING | {"keep_alive": keep_alive, "turn": turn}}
    document = scenario(
        seed=seed, workload={"arrivals": {"process": "poisson", "rate": rate}, "models": {"count": models, "zipf": 1}},
        engine={**engine, "async_scheduling": asynchronous}, system=ALL,
    )  # fmt: skip
    run_both_ways(document)


def test_a_step_pays_for_its_adapters_and_their_loads() -> None:
    document = scenario(
        workload={
            "requests": 1, "prefill": {"distribution": "fixed", "mean": 10},
            "decode": {"distribution": "fixed", "mean": 3}, "models": {"count": 2},
        },
        engine={"lora_config": LORA}, system=ALL,
        step_time={"overhead": 0.004, "per_token": 0.0, "per_kv_token": 0.0},
    )  # fmt: skip
    columns = run(document).columns.table()
    first, last, arrival = (float(columns[name][0]) for name in ("first_token", "last_token", "arrival"))
    row = 1e-5 + 16e-6
    assert first - arrival == pytest.approx(0.004 + 0.001 + 0.0005 + 10 * row + 0.001 + 0.01)  # and 1e8 B at 1e10 B/s
    assert last - first == pytest.approx(2 * (0.004 + 0.001 + 0.0005 + row))


def test_requests_for_the_base_model_cost_nothing_more() -> None:
    plain = scenario(workload={"requests": 40})
    with_lora = scenario(workload={"requests": 40}, engine={"lora_config": LORA | {"base_model": "default"}})
    assert records(run(plain)) == records(run(with_lora))


def test_bytes_of_an_adapter_are_those_of_its_layers() -> None:
    model = load_model("llama-3.1-8b", Path())
    widths = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert adapter_bytes(model, 16, TARGET_MODULES) == 32 * 16 * widths * 2 == 83886080
    split = (4096 + 2048) * 2 + 2 * (4096 + 512) + 3 * (4096 + 7168)
    assert adapter_bytes(model, 16, TARGET_MODULES, 2) == 32 * 16 * split * 2
    assert adapter_bytes(load_model("deepseek-v3", Path()), 16, TARGET_MODULES) is None


@pytest.mark.parametrize("source", ["memory", "roofline"])
def test_slots_take_blocks(source: str) -> None:
    """128 KiB a token: a block of 16 tokens is 2 MiB, an adapter of rank 16 is 40 blocks, the weights are 7,658."""
    roofline = {"source": "roofline", "model": "llama-3.1-8b", "hardware": "h100-sxm"}
    document = scenario(workload={"models": {"count": 4}}, system=ALL)
    document["engine"] = {"kv_memory": MEMORY} if source == "memory" else {}
    if source == "roofline":
        document["step_time"] = roofline

    def blocks(**engine: Any) -> int:
        return plan_of({**document, "engine": {**document["engine"], **engine}}).scheduler.config.num_gpu_blocks

    lora = {**LORA, "adapter_bytes": None, "max_loras": 3}
    swapping = {"load": {"bandwidth": 1e10}, "resident": 3}
    assert blocks() - blocks(lora_config=lora) in (120, 121)
    assert blocks() - blocks(weight_swapping=swapping) == pytest.approx(2 * 16060522496 / 2**21, abs=2)


def test_resident_models_are_as_many_as_leave_room_for_the_cache() -> None:
    document = scenario(workload={"models": {"count": 8}}, system=ALL)
    document["engine"] = {"kv_memory": MEMORY, "weight_swapping": {"load": {"bandwidth": 1e10}}}
    config = plan_of(document).scheduler.config
    assert config.model_slots.slots == 3  # 77.3 GB, of which three quarters are 58, and 16 GB each
    document["engine"]["weight_swapping"]["models"] = 2
    config = plan_of(document).scheduler.config
    assert config.model_slots.slots == 2


def test_five_strategies_for_one_fleet() -> None:
    document = scenario(workload={"models": {"count": 6, "zipf": 1.0}, "requests": 30})
    document["engine"] = {"kv_memory": MEMORY}
    results = {}
    for strategy in ("isolated", "sun", "qsun", "multi_lora", "swapping"):
        plan = plan_of({**document, "system": {**FLEET, "strategy": strategy}})
        results[strategy] = [(pool.spec.name, pool.spec.role, len(pool.names), [*pool.engines]) for pool in plan.pools]
        assert len(run({**document, "system": {**FLEET, "strategy": strategy}}).columns.arrival) == 30
    models = [f"model-{i}" for i in range(6)]
    halves = [("model-0", 3), *((model, 1) for model in models[1:])]
    assert results["isolated"] == [(model, "both", count, [model]) for model, count in halves]
    groups = [["model-0"], ["model-1"], ["model-2", "model-5"], ["model-3", "model-4"]]
    assert results["swapping"] == [(f"engine-{i}", "both", 1, group) for i, group in enumerate(groups)]
    assert results["multi_lora"] == [("engine", "both", 4, models)]
    groups = [["model-0", "model-4", "model-5"], ["model-1", "model-2", "model-3"]]
    assert results["sun"] == results["qsun"]
    assert results["sun"] == [
        *((f"prefill-{i}", "prefill", 1, group) for i, group in enumerate(groups)), ("decode", "decode", 2, models),
    ]  # fmt: skip


def test_parts_of_a_device_have_parts_of_its_memory_and_speed() -> None:
    document = scenario(workload={"models": {"count": 6}, "requests": 30})
    document["engine"] = {"kv_memory": MEMORY}
    document["system"] = {**FLEET, "strategy": "isolated", "device": {"type": "h100", "price_per_hour": 2.0}}
    halved = plan_of(document)
    document["system"]["engines"] = 6
    full_plan = plan_of(document)
    weights = 16060522496
    blocks = [plan.scheduler.config.num_gpu_blocks for plan in (halved, full_plan)]
    assert blocks == [pytest.approx((85899345920 * share - weights) / 2**21, abs=1) for share in (0.45, 0.9)]
    ours, expected = (plan.step_time.decode_seconds(3, 30, 10, 4) for plan in (halved, full_plan))
    assert ours == [2 * their for their in expected]


def test_devices_divided_are_counted_whole() -> None:
    from twin.serving.plan.pools import describe_devices

    document = scenario(workload={"models": {"count": 6}})
    document["engine"] = {"kv_memory": MEMORY}
    document["system"] = {**FLEET, "strategy": "isolated", "device": {"type": "h100", "price_per_hour": 2.0}}
    assert describe_devices(plan_of(document).pools) == {"total": 4, "by_type": {"h100": 4}, "cost_per_hour": 8.0}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"strategy": "sun", "link": None}, "system.link"),
        ({"strategy": "qsun", "quantised_step_time": None}, "system.quantised_step_time"),
        ({"strategy": "multi_lora", "lora": None}, "system.lora"),
        ({"strategy": "swapping", "swapping": None}, "system.swapping"),
        ({"strategy": "sun", "engines": 1}, "system.prefill_engines"),
        ({"strategy": "hydra"}, "system.strategy"),
        ({"strategy": "isolated"}, "engine.num_gpu_blocks"),
    ],
)
def test_what_a_strategy_needs(change: dict[str, Any], field: str) -> None:
    document = scenario(workload={"models": {"count": 6}}, system={**FLEET, **change})
    with pytest.raises(BadInput) as raised:
        prepare(document, Path("s.yaml"))
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"lora_config": LORA, "weight_swapping": SWAPPING}, "either lora_config or weight_swapping"),
        ({"lora_config": LORA, "data_parallel_size": 2}, "data_parallel_size 1 with lora_config"),
        ({"lora_config": LORA | {"max_cpu_loras": 1}}, "max_cpu_loras of at least max_loras"),
        ({"weight_swapping": {**SWAPPING, "resident": "auto"}}, "neither kv_memory nor step_time"),
        ({"lora_config": LORA | {"cost": "nowhere.yaml"}}, "nowhere.yaml"),
    ],
)
def test_unusable_sections(engine: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput) as raised:
        prepare(scenario(engine=engine), Path("s.yaml"))
    assert expected in str(raised.value)


def test_prompts_of_two_models_share_no_cache() -> None:
    """Adapters change keys and values: a prefix that one model's requests left is not another's."""
    document = scenario(
        workload={
            "prefixes": {"groups": 1, "tokens": 64}, "prefill": {"distribution": "fixed", "mean": 80},
            "models": {"count": 3}, "arrivals": {"process": "poisson", "rate": 1},
        },
        engine={"lora_config": LORA | {"max_loras": 3}},
        system={"layout": "pools", "pools": [{"name": "engine", "models": "all"}]},
    )  # fmt: skip
    assert sum(run(document).columns.table()["cached_tokens"] == 0) == 3
