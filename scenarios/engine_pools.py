"""The engines of a serving scenario's pools, for a backend that runs each in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scenarios.autoscaling import check_fixed
from scenarios.engine import SchedulerPlan
from scenarios.overrides import Settings
from scenarios.pools import PoolSpec
from scenarios.scheduling import scheduling_settings
from scenarios.serving import ServingScenario, check_scenario
from scenarios.single_engine import check_live_tiers, check_no_slots, check_one_stage
from workloads.errors import BadInput


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
