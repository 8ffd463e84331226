"""The engines of a serving scenario, for a live backend: one engine, or pools of engines in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.io.earlier_names import print_note
from scenarios.engine import EngineSpec, SchedulerPlan, scheduling_settings
from scenarios.overload import check_fixed
from scenarios.overrides import Settings
from scenarios.pools import PoolSpec, router_name
from scenarios.serving import ServingScenario, check_scenario
from workloads.errors import BadInput


def single_engine(document: dict[str, Any], settings: Settings, path: Path) -> SchedulerPlan:
    """The plan of the scheduler of a scenario's engine: the same in the simulator and in a live server.

    Files that the scenario names are read where the scheduler depends on them: a trace for the length of its prefix
    blocks, step times for a chunk policy that uses their table. A scenario with several engines or with a
    `system.routing` causes one note on stderr, since a router has nothing to choose here.

    Raises:
        BadInput: the scenario cannot be used, or describes more than replicas of one engine.
    """
    scenario = check_scenario(document, settings, path)
    if len(pools := scenario.pools) > 1:
        expected = "expected one pool: a server runs one engine, which prefills and decodes"
        raise BadInput(f"{expected}; found {', '.join(pool.name for pool in pools)}", field="system", file=path)
    engine, base = pools[0].engine, path.parent
    if engine.data_parallel_size > 1:
        expected = "expected 1: a server runs one engine, without data-parallel ranks"
        raise BadInput(expected, field="engine.data_parallel_size", value=engine.data_parallel_size, file=path)
    check_one_stage(engine, "engine", path)
    check_live_tiers(engine, "engine", path)
    check_no_slots(engine, "engine", path)
    num_engines, system = pools[0].num_engines(scenario.workload.models.count), scenario.system
    if num_engines > 1 or "routing" in system.model_fields_set:
        name = router_name(system.routing)
        count = f"1 of the scenario's {num_engines} engines" if num_engines > 1 else "one engine"
        print_note(f"{path}: {count} is run, which gets every request: system.routing {name} chooses nothing")
    workload = scenario.workload.build(scenario.workload.read_trace(base))
    step_time = pools[0].step_time.build(base) if engine.needs_step_time else None
    return engine.build(base, workload.prefix_block_tokens, step_time)


def check_one_stage(engine: EngineSpec, section: str, path: Path) -> None:
    """Refuse pipeline stages, which a live engine does not have. `section`: the name of the engine's settings.

    Raises:
        BadInput: more stages than one.
    """
    if engine.pipeline_parallel_size > 1:
        expected = "expected 1: a live engine has all layers on one device"
        field = f"{section}.pipeline_parallel_size"
        raise BadInput(expected, field=field, value=engine.pipeline_parallel_size, file=path)


def check_no_slots(engine: EngineSpec, section: str, path: Path) -> None:
    """Refuse models in slots, whose files a scenario does not name. `section`: the name of the engine's settings.

    Raises:
        BadInput: adapters, or weights that are swapped.
    """
    if engine.lora_config is not None:
        expected = "expected none: a live engine is given adapters by --lora-modules, without a scenario"
        raise BadInput(expected, field=f"{section}.lora_config", file=path)
    if engine.weight_swapping is not None:
        expected = "expected none: a live engine does not swap weights"
        raise BadInput(expected, field=f"{section}.weight_swapping", file=path)


def check_live_tiers(engine: EngineSpec, section: str, path: Path) -> None:
    """Refuse tiers that a live engine does not have. `section`: the dotted name of the engine's settings.

    Raises:
        BadInput: a tier on disk.
    """
    if engine.kv_offloading is not None and engine.kv_offloading.disk is not None:
        expected = "expected none: a live engine has a tier in host memory and none on disk"
        raise BadInput(expected, field=f"{section}.kv_offloading.disk", file=path)


@dataclass(frozen=True)
class EnginePool:
    """Engines that are alike.

    Attributes:
        spec: the pool in the scenario. scheduler: what each engine's scheduler is built from.
    """

    spec: PoolSpec
    scheduler: SchedulerPlan


def engine_pools(document: dict[str, Any], settings: Settings, path: Path) -> tuple[ServingScenario, list[EnginePool]]:
    """A scenario and its pools, those that prefill first.

    Raises:
        BadInput: the scenario cannot be used, or its engines have what live engines of several processes do not.
    """
    scenario = check_scenario(document, settings, path)
    check_fixed(scenario.system.autoscaling, "live engines are neither started nor stopped", path)
    workload = scenario.workload.build(scenario.workload.read_trace(path.parent))
    pools = []
    for i, spec in enumerate(scenario.pools):
        section = scenario.system.section(i, "engine")
        if spec.engine.data_parallel_size > 1:
            expected = "expected 1: live engines have no data-parallel ranks"
            value = spec.engine.data_parallel_size
            raise BadInput(expected, field=f"{section}.data_parallel_size", value=value, file=path)
        if spec.engine.async_scheduling:
            expected = "expected false: live engines in processes of their own schedule no step ahead"
            raise BadInput(expected, field=f"{section}.async_scheduling", value=True, file=path)
        check_one_stage(spec.engine, section, path)
        check_live_tiers(spec.engine, section, path)
        if spec.engine.admission_control is not None:
            expected = "expected none: live engines in processes of their own shed no requests"
            raise BadInput(expected, field=f"{section}.admission_control", file=path)
        policy = scheduling_settings(spec.engine.scheduling_policy)["scheduling_policy"]
        if policy in ("deadline", "fair"):
            expected = "expected another one: live engines in processes of their own know no classes and tenants"
            raise BadInput(expected, field=f"{section}.scheduling_policy", value=policy, file=path)
        check_no_slots(spec.engine, section, path)
        if spec.engine.speculative_config is not None:
            expected = "expected none: live engines in processes of their own do not speculate"
            raise BadInput(expected, field=f"{section}.speculative_config", file=path)
        step_time = spec.step_time.build(path.parent) if spec.engine.needs_step_time else None
        pools.append(EnginePool(spec, spec.engine.build(path.parent, workload.prefix_block_tokens, step_time)))
    first = pools[0].scheduler.config
    for pool in pools:
        config = pool.scheduler.config
        if (config.block_size, config.prefix_id_tokens) != (first.block_size, first.prefix_id_tokens):
            expected = f"expected {first.block_size}, as in pool {pools[0].spec.name}: caches are sent block by block"
            raise BadInput(expected, field="engine.block_size", value=config.block_size, file=path)
    return scenario, pools
