"""Many models on the same devices by one of five strategies: `system.strategy`.

A fleet of `engines` devices (or groups of devices that one engine spans) serves the workload's models. The strategy
says how they share it, and expands to the pools that one would write by hand:

- `isolated`: every model has engines of its own, by popularity. Where there are more models than devices, a device is
  divided into equal parts.
- `sun`: prefill engines have modules of their own for each model, decode engines one decoder for all (SUN 3.2).
- `qsun`: the same with a decoder in few bits (SUN 3.3).
- `multi_lora`: every engine has one base model, and adapters of the others.
- `swapping`: every engine serves its share of the models, whose weights it swaps.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from latency_models.sources.registry import StepTimeSpec
from scenarios.engine import EngineSpec
from scenarios.kv_memory import KVMemorySpec
from scenarios.model_slots import LoRASpec, WeightSwappingSpec
from scenarios.pools import DeviceSpec, PoolSpec, Role, Strategy
from workloads.errors import BadInput


@dataclass(frozen=True)
class Fleet:
    """A fleet of `engines` engines, of which `num_prefill` prefill under sun and qsun, and its strategy's sections."""

    strategy: Strategy
    engines: int
    num_prefill: int
    quantised_step_time: StepTimeSpec | None
    lora: LoRASpec | None
    swapping: WeightSwappingSpec | None
    device: DeviceSpec | None


def expand_strategy(
    fleet: Fleet, shares: Mapping[str, float], engine: EngineSpec, step_time: StepTimeSpec
) -> list[PoolSpec]:
    """The pools of a fleet, for models with these shares of all requests."""
    if fleet.strategy == "isolated":
        return _isolated(fleet, shares, engine, step_time)
    if fleet.strategy == "multi_lora":
        with_adapters = engine.model_copy(update={"lora_config": fleet.lora})
        return [_pool(fleet, "engine", fleet.engines, [*shares], with_adapters, step_time)]
    if fleet.strategy == "swapping":
        return _swapping(fleet, "engine", fleet.engines, shares, engine, step_time)
    decoder = step_time if fleet.strategy == "sun" else fleet.quantised_step_time or step_time
    prefill = _swapping(fleet, "prefill", fleet.num_prefill, shares, engine, step_time, "prefill")
    return [*prefill, _pool(fleet, "decode", fleet.engines - fleet.num_prefill, [*shares], engine, decoder, "decode")]


def _isolated(fleet: Fleet, shares: Mapping[str, float], engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
    """A pool for each model, on equal parts of devices where there are fewer devices than models."""
    parts = -(-len(shares) // fleet.engines)
    if parts > 1:
        if engine.num_gpu_blocks is not None:
            expected = f"expected kv_memory in its place, since {parts} models share the memory of a device"
            raise BadInput(expected, field="engine.num_gpu_blocks", value=engine.num_gpu_blocks)
        memory = engine.kv_memory or KVMemorySpec()
        part = memory.model_copy(update={"gpu_memory_utilization": memory.gpu_memory_utilization / parts})
        engine = engine.model_copy(update={"kv_memory": part})
    replicas = replicas_by_share(shares, fleet.engines * parts)
    pools = [_pool(fleet, model, count, [model], engine, step_time) for model, count in replicas.items()]
    return [pool.model_copy(update={"engines_per_device": parts}) for pool in pools]


def _swapping(
    fleet: Fleet, name: str, engines: int, shares: Mapping[str, float], engine: EngineSpec,
    step_time: StepTimeSpec, role: Role = "both",
) -> list[PoolSpec]:  # fmt: skip
    """A pool for each engine that swaps its share of the models, or for each model where there are enough engines."""
    if len(shares) <= engines:
        counts = replicas_by_share(shares, engines)
        return [
            _pool(fleet, f"{name}-{model}", count, [model], engine, step_time, role) for model, count in counts.items()
        ]
    pools = []
    # Prefill engines can keep equal numbers of models in memory; one that swaps for decodes is better left to a few.
    room = -(-len(shares) // engines) if role == "prefill" else len(shares)
    for i, models in enumerate(balanced_groups(shares, engines, room)):
        assert fleet.swapping is not None, "the section is required of strategies that swap"
        swapping = fleet.swapping.model_copy(update={"models": len(models)})
        settings = engine.model_copy(update={"weight_swapping": swapping}) if len(models) > 1 else engine
        pools.append(_pool(fleet, f"{name}-{i}", 1, models, settings, step_time, role))
    return pools


def _pool(
    fleet: Fleet, name: str, replicas: int, models: list[str], engine: EngineSpec, step_time: StepTimeSpec,
    role: Role = "both",
) -> PoolSpec:  # fmt: skip
    return PoolSpec(
        name=name, role=role, replicas=replicas, models=models, engine=engine, step_time=step_time, device=fleet.device
    )


def replicas_by_share(shares: Mapping[str, float], engines: int) -> dict[str, int]:
    """Engines of each model: one, and the others one by one to the model with the largest share an engine.

    That minimises the largest share an engine. There are at least as many engines as models.
    """
    replicas = dict.fromkeys(shares, 1)
    heap = [(-share, i, model) for i, (model, share) in enumerate(shares.items())]
    heapq.heapify(heap)
    for _ in range(engines - len(shares)):
        _, i, model = heap[0]
        replicas[model] += 1
        heapq.heapreplace(heap, (-shares[model] / replicas[model], i, model))
    return replicas


def balanced_groups(shares: Mapping[str, float], groups: int, room: int) -> list[list[str]]:
    """Models in `groups` groups of similar shares, of at most `room` models each.

    The most popular model goes first, each to the group with the least so far that has room.
    """
    heap: list[tuple[float, int]] = [(0.0, i) for i in range(groups)]
    members: list[list[str]] = [[] for _ in range(groups)]
    for model in sorted(shares, key=lambda model: -shares[model]):
        load, i = heap[0]
        members[i].append(model)
        if len(members[i]) < room:
            heapq.heapreplace(heap, (load + shares[model], i))
        else:
            heapq.heappop(heap)
    return [group for group in members if group]
