"""Pools of engines, of which every system consists, the routers before them, and pools for many models."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.io.config_io import Strict
from latency_models.sources.registry import StepTimeSpec
from scenarios.engine import EngineSpec
from scenarios.fields import Engines, Name, PolicySpec, VirtualNodes, make_policy, name_or_section, named, registered
from schedulers.routing import ROUTERS, Draw, Router
from workloads.errors import BadInput

if TYPE_CHECKING:
    from scenarios.memory import LoRASpec, WeightSwappingSpec

RouterName = Annotated[str, registered(ROUTERS)]


class RouterSpec(PolicySpec):
    """A router with parameters, which docs/reference/serving-scenario.md describes."""

    policy: RouterName
    weight: NonNegativeFloat | None = None
    load_factor: Annotated[float, Field(ge=1)] | None = None
    virtual_nodes: VirtualNodes | None = None
    max_sessions: PositiveInt | None = None


Routing = Annotated[str | RouterSpec, name_or_section(ROUTERS, lambda size: 0)]
"""The name of a router, or a section with its name and parameters."""


class KVEventsSpec(Strict):
    """Routers know of prefix caches by events, which take `delay` seconds (vLLM's `kv_events_config`)."""

    delay: NonNegativeFloat = 0.0


def make_router(routing: str | RouterSpec, draw: Draw) -> Router:
    return make_policy(ROUTERS, *named(routing), draw, field="system.routing")


def router_name(routing: str | RouterSpec) -> str:
    """The name of a router that is given with or without parameters."""
    return named(routing)[0]


Role = Literal["both", "prefill", "decode"]
Serves = Literal["each", "all"]
Strategy = Literal["isolated", "sun", "qsun", "multi_lora", "swapping"]
"""Ways in which the models of a fleet share its engines. Each expands to the pools that one would write by hand:

- `isolated`: every model has engines of its own, by popularity. Where there are more models than devices, a device is
  divided into equal parts.
- `sun`: prefill engines have modules of their own for each model, decode engines one decoder for all (SUN 3.2).
- `qsun`: the same with a decoder in few bits (SUN 3.3).
- `multi_lora`: every engine has one base model, and adapters of the others.
- `swapping`: every engine serves its share of the models, whose weights it swaps.
"""

SHARED_DECODER = ("sun", "qsun")
"""Strategies with one decoder for all models."""


class DeviceSpec(Strict):
    """The devices of one engine of a pool: the price of each per hour, in any currency, and its power, watts."""

    type: str
    count: PositiveInt = 1
    price_per_hour: NonNegativeFloat | None = None
    power_limit: PositiveFloat | None = None
    idle_power: NonNegativeFloat | None = None


class LinkSpec(Strict):
    """The link that KV caches cross between prefill and decode: bytes/s, seconds, bytes of cache a token.

    `shared`: one link for all prefill engines. `transfer`: a cache leaves when its prompt has been computed, or with
    each chunk, into blocks that the decode engine reserves when the first begins.
    """

    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    bytes_per_token: NonNegativeFloat
    shared: bool = False
    transfer: Literal["after_prefill", "with_chunks"] = "after_prefill"


class PoolSpec(Strict):
    """Engines that are alike; docs/reference/serving-scenario.md describes every field."""

    name: Name
    role: Role = "both"
    replicas: Engines = 1
    models: Serves | Annotated[list[str], Field(min_length=1)] = "each"
    engine: EngineSpec
    step_time: StepTimeSpec
    device: DeviceSpec | None = None
    speed: PositiveFloat | None = None
    engines_per_device: PositiveInt = 1

    def engine_names(self, models: list[str]) -> dict[str, list[str]]:
        """Names of the engines that serve each of the scenario's `models`, for those that it serves."""

        def numbered(prefix: str) -> list[str]:
            return [f"{prefix}{self.name}-{i}" for i in range(self.replicas)]

        if self.models == "each" and len(models) > 1:
            return {model: numbered(f"{model}/") for model in models}
        served = self.models if isinstance(self.models, list) else models
        return dict.fromkeys(served, numbered(""))

    def num_engines(self, models: int) -> int:
        """Number of engines in a scenario of `models` models."""
        return self.replicas * (models if self.models == "each" else 1)


def fill_pools(document: Any) -> Any:
    """Fill a document's pools: missing settings are the scenario's; KV memory in either form replaces both."""
    system = document.get("system") if isinstance(document, dict) else None
    if not isinstance(system, dict) or not isinstance(pools := system.get("pools"), list):
        return document
    common = {name: document[name] for name in ("engine", "step_time") if name in document}
    filled = [_filled(pool, common) if isinstance(pool, dict) else pool for pool in pools]
    return {**document, "system": {**system, "pools": filled}}


def _filled(pool: dict[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    filled = {**common, **pool}
    settings, inherited = pool.get("engine"), common.get("engine")
    if isinstance(settings, dict) and isinstance(inherited, dict):
        memory = {"num_gpu_blocks", "kv_memory"}
        dropped = memory if memory & {name for name, value in settings.items() if value is not None} else set()
        filled["engine"] = {name: value for name, value in inherited.items() if name not in dropped} | settings
    return filled


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
        from scenarios.memory import KVMemorySpec

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
    """Engines of each model: one, and the others one by one to the model with the largest share an engine."""
    replicas = dict.fromkeys(shares, 1)
    heap = [(-share, i, model) for i, (model, share) in enumerate(shares.items())]
    heapq.heapify(heap)
    for _ in range(engines - len(shares)):
        _, i, model = heap[0]
        replicas[model] += 1
        heapq.heapreplace(heap, (-shares[model] / replicas[model], i, model))
    return replicas


def balanced_groups(shares: Mapping[str, float], groups: int, room: int) -> list[list[str]]:
    """Models in `groups` groups of similar shares, at most `room` each: the most popular first, to the least group."""
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
