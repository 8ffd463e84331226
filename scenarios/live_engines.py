"""The schedulers of live engines, from a scenario of kind serving: of one engine, or of each pool's engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.io.config_io import print_note
from scenarios.engine import ONE_STAGE, EngineSpec, SchedulerPlan
from scenarios.fields import named, refuse_first
from scenarios.overload import check_fixed
from scenarios.overrides import Settings
from scenarios.pools import PoolSpec, router_name
from scenarios.serving import ServingScenario, check_scenario
from workloads.errors import BadInput


def single_engine(document: dict[str, Any], settings: Settings, path: Path) -> SchedulerPlan:
    """The plan of the scheduler of a scenario's engine: the same in the simulator and in a live server.

    Files that the scenario names are read where the scheduler depends on them. A scenario with several engines or a
    `system.routing` causes one note on stderr, since a router has nothing to choose here.
    """
    scenario = check_scenario(document, settings, path)
    if len(pools := scenario.pools) > 1:
        expected = "expected one pool: a server runs one engine, which prefills and decodes"
        raise BadInput(f"{expected}; found {', '.join(pool.name for pool in pools)}", field="system", file=path)
    engine, base = pools[0].engine, path.parent
    _refuse_sections(engine, "engine", path, single=True)
    num_engines, system = pools[0].num_engines(scenario.workload.models.count), scenario.system
    if num_engines > 1 or "routing" in system.model_fields_set:
        name = router_name(system.routing)
        count = f"1 of the scenario's {num_engines} engines" if num_engines > 1 else "one engine"
        print_note(f"{path}: {count} is run, which gets every request: system.routing {name} chooses nothing")
    workload = scenario.workload.build(scenario.workload.read_trace(base))
    step_time = pools[0].step_time.build(base) if engine.needs_step_time else None
    return engine.build(base, workload.prefix_block_tokens, step_time)


def tensor_parallel_size(pool: PoolSpec) -> int:
    """The devices that share each layer of a pool's engines, as its step times or its memory say."""
    memory = pool.engine.kv_memory
    stated = 1 if memory is None else memory.tensor_parallel_size
    return max(stated, int(getattr(pool.step_time, "tensor_parallel", 1)))


def _refuse_sections(engine: EngineSpec, section: str, path: Path, *, single: bool) -> None:
    """Refuse what a live engine does not have; `single`: the server runs this engine alone, in its own process."""
    tiers, ranks, stages = engine.kv_offloading, engine.data_parallel_size, engine.pipeline_parallel_size
    policy, apart = named(engine.scheduling_policy)[0], "live engines in processes of their own"
    refuse_first([
        (is_refused, f"{section}.{field}", value, expected)
        for field, is_refused, value, expected in [
            ("data_parallel_size", ranks > 1, ranks, "expected 1: live engines have no data-parallel ranks"),
            ("async_scheduling", engine.async_scheduling and not single, True,
             f"expected false: {apart} schedule no step ahead"),
            ("pipeline_parallel_size", stages > 1, stages, ONE_STAGE),
            ("kv_offloading.disk", tiers is not None and tiers.disk is not None, None,
             "expected none: a live engine has a tier in host memory and none on disk"),
            ("admission_control", engine.admission_control is not None and not single, None,
             f"expected none: {apart} shed no requests"),
            ("scheduling_policy", policy in ("deadline", "fair") and not single, policy,
             f"expected another one: {apart} know no classes and tenants"),
            ("lora_config", engine.lora_config is not None, None,
             "expected none: a live engine is given adapters by --lora-modules, without a scenario"),
            ("weight_swapping", engine.weight_swapping is not None, None,
             "expected none: a live engine does not swap weights"),
            ("speculative_config", engine.speculative_config is not None and not single, None,
             f"expected none: {apart} do not speculate"),
        ]
    ], path)  # fmt: skip


@dataclass(frozen=True)
class EnginePool:
    """Engines that are alike: the pool in the scenario, and what each engine's scheduler is built from."""

    spec: PoolSpec
    scheduler: SchedulerPlan


def engine_pools(document: dict[str, Any], settings: Settings, path: Path) -> tuple[ServingScenario, list[EnginePool]]:
    """A scenario and its pools, those that prefill first."""
    scenario = check_scenario(document, settings, path)
    check_fixed(scenario.system.autoscaling, "live engines are neither started nor stopped", path)
    workload = scenario.workload.build(scenario.workload.read_trace(path.parent))
    pools = []
    for i, spec in enumerate(scenario.pools):
        _refuse_sections(spec.engine, scenario.system.section(i, "engine"), path, single=False)
        step_time = spec.step_time.build(path.parent) if spec.engine.needs_step_time else None
        pools.append(EnginePool(spec, spec.engine.build(path.parent, workload.prefix_block_tokens, step_time)))
    first = pools[0].scheduler.config
    for pool in pools:
        config = pool.scheduler.config
        if (config.block_size, config.prefix_id_tokens) != (first.block_size, first.prefix_id_tokens):
            expected = f"expected {first.block_size}, as in pool {pools[0].spec.name}: caches are sent block by block"
            raise BadInput(expected, field="engine.block_size", value=config.block_size, file=path)
    return scenario, pools
