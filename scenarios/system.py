"""The `system` section of a serving scenario: pools of engines, routing, links and outages."""

from __future__ import annotations

import functools
import heapq
import operator
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from latency_models.io.config_io import Strict, checked, late_section, late_sections
from latency_models.sources.registry import StepTimeSpec
from scenarios.engine import DeviceSpec, EngineSpec, KVEventsSpec, LinkSpec, PoolSpec, Role, Routing, Serves
from scenarios.fields import Engines
from workloads.errors import BadInput
from workloads.registry import Registry

if TYPE_CHECKING:
    from scenarios.memory import LoRASpec, WeightSwappingSpec
    from scenarios.overload import Autoscaling
else:
    Autoscaling = late_section("scenarios.overload", "Autoscaling")
    LoRASpec, WeightSwappingSpec = late_sections("scenarios.memory", "LoRASpec", "WeightSwappingSpec")


class FrontendSpec(Strict):
    """Seconds of a request outside of steps: to its engine, to its client, and before its cache begins to leave."""

    route: NonNegativeFloat = 0.0
    deliver: NonNegativeFloat = 0.0
    hand_over: NonNegativeFloat = 0.0


class SystemSpec(Strict):
    """Base class of the forms of a `system` section, each of which expands to a list of pools.

    A subclass has a field `layout: Literal["its name"]` and is registered in `LAYOUTS`.
    """

    layout: str
    routing: Routing = "least_loaded"
    frontend: FrontendSpec = Field(default_factory=FrontendSpec)
    kv_events: KVEventsSpec | None = None
    autoscaling: Autoscaling | None = None

    @abstractmethod
    def expand(self, engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        """The pools; `engine` and `step_time` are the scenario's own."""

    def expand_for(self, shares: Mapping[str, float], engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        """The pools for models with these shares of all requests; `expand` where the shares do not matter."""
        return self.expand(engine, step_time)

    def pool(self, name: str, engine: EngineSpec, step_time: StepTimeSpec, **others: Any) -> PoolSpec:
        """A pool on the devices of this section."""
        device = getattr(self, "device", None)
        return PoolSpec(name=name, engine=engine, step_time=step_time, device=device, **others)

    @property
    def topology(self) -> str:
        """The name of the topology that the simulator builds of the pools (`twin.serving.system.topologies`)."""
        return self.layout

    @property
    def kv_link(self) -> LinkSpec | None:
        """The link from prefill to decode engines; None where there is none."""
        return getattr(self, "link", None)

    def section(self, pool: int, field: str) -> str:
        """The dotted name of the section that gave a field of a pool, `engine` or `step_time`."""
        return field


LAYOUTS: Registry[type[SystemSpec]] = Registry()
"""Forms of the `system` section by the value of `layout`."""


@LAYOUTS.register("colocated")
class ColocatedSpec(SystemSpec):
    """Engines that prefill and decode. With several models, `replicas` engines for each."""

    layout: Literal["colocated"] = "colocated"
    replicas: Engines = 1
    device: DeviceSpec | None = None

    def expand(self, engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        return [self.pool("engine", engine, step_time, replicas=self.replicas)]


@LAYOUTS.register("disaggregated")
class DisaggregatedSpec(SystemSpec):
    """Prefill engines for each model, decode engines for each (`isolated`) or for all (`shared`; SUN 3.2.3)."""

    layout: Literal["disaggregated"]
    prefill_replicas: Engines = 1
    decode: Literal["isolated", "shared"] = "isolated"
    decode_replicas: Engines = 1
    link: LinkSpec
    decode_step_time: StepTimeSpec | None = None
    device: DeviceSpec | None = None

    def expand(self, engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        serves: Serves = "all" if self.decode == "shared" else "each"
        decode_time = self.decode_step_time or step_time
        return [
            self.pool("prefill", engine, step_time, role="prefill", replicas=self.prefill_replicas),
            self.pool("decode", engine, decode_time, role="decode", replicas=self.decode_replicas, models=serves),
        ]

    def section(self, pool: int, field: str) -> str:
        is_decoder = pool == 1 and field == "step_time" and self.decode_step_time is not None
        return "system.decode_step_time" if is_decoder else field


@LAYOUTS.register("pools")
class PoolsSpec(SystemSpec):
    """A list of pools, each with settings of its own. Several pools may serve a model: the router sees all of them."""

    layout: Literal["pools"] = "pools"
    pools: list[PoolSpec] = Field(min_length=1, max_length=1000)
    link: LinkSpec | None = None

    @model_validator(mode="after")
    def _roles(self) -> PoolsSpec:
        names = [pool.name for pool in self.pools]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise BadInput("expected a name that no other pool has", field=f"pools[{i}].name", value=name)
        roles = {pool.role for pool in self.pools}
        if roles not in ({"both"}, {"prefill", "decode"}):
            expected = f"expected pools of role both, or of prefill and decode, found {' and '.join(sorted(roles))}"
            raise BadInput(expected, field="pools")
        if ("prefill" in roles) != (self.link is not None):
            expected = "expected a link from prefill to decode engines" if "prefill" in roles else "expected none"
            raise BadInput(f"{expected}, since pools have the role {' and '.join(sorted(roles))}", field="link")
        return self

    def expand(self, engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        return sorted(self.pools, key=lambda pool: pool.role == "decode")

    @property
    def topology(self) -> str:
        return "colocated" if self.link is None else "disaggregated"

    def section(self, pool: int, field: str) -> str:
        expanded = sorted(range(len(self.pools)), key=lambda i: self.pools[i].role == "decode")
        return f"system.pools[{expanded[pool]}].{field}"


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


@LAYOUTS.register("many_models")
class ManyModelsSpec(SystemSpec):
    """One fleet, and the strategy by which the models of the workload share it; the reference has every field."""

    layout: Literal["many_models"]
    strategy: Strategy
    engines: Engines
    prefill_engines: Engines | None = None
    link: LinkSpec | None = None
    quantised_step_time: StepTimeSpec | None = None
    lora: LoRASpec | None = None
    swapping: WeightSwappingSpec | None = None
    device: DeviceSpec | None = None

    @model_validator(mode="after")
    def _has_what_its_strategy_needs(self) -> ManyModelsSpec:
        shared = self.strategy in SHARED_DECODER
        requirements = {
            "link": shared, "quantised_step_time": self.strategy == "qsun", "lora": self.strategy == "multi_lora",
            "swapping": shared or self.strategy == "swapping",
        }  # fmt: skip
        for field, is_needed in requirements.items():
            if is_needed and getattr(self, field) is None:
                raise BadInput(f"expected this section, which the strategy {self.strategy} needs", field=field)
        if shared and not 1 <= self.num_prefill < self.engines:
            expected = f"expected 1 to {self.engines - 1}, and 2 engines or more: some prefill, the others decode"
            raise BadInput(expected, field="prefill_engines", value=self.num_prefill)
        return self

    @property
    def num_prefill(self) -> int:
        """Engines that prefill under sun and qsun."""
        return self.engines // 2 if self.prefill_engines is None else self.prefill_engines

    @property
    def topology(self) -> str:
        return "disaggregated" if self.strategy in SHARED_DECODER else "colocated"

    @property
    def kv_link(self) -> LinkSpec | None:
        return self.link if self.strategy in SHARED_DECODER else None

    def section(self, pool: int, field: str) -> str:
        decodes_in_few_bits = self.strategy == "qsun" and field == "step_time" and pool >= self.num_prefill
        return "system.quantised_step_time" if decodes_in_few_bits else field

    def expand(self, engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        return self.expand_for({"default": 1.0}, engine, step_time)

    def expand_for(self, shares: Mapping[str, float], engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        if self.strategy == "isolated":
            return self._isolated(shares, engine, step_time)
        if self.strategy == "multi_lora":
            with_adapters = engine.model_copy(update={"lora_config": self.lora})
            return [self.pool("engine", with_adapters, step_time, role="both", replicas=self.engines, models=[*shares])]
        if self.strategy == "swapping":
            return self._swapping("engine", self.engines, shares, engine, step_time)
        decoder = step_time if self.strategy == "sun" else self.quantised_step_time or step_time
        prefill = self._swapping("prefill", self.num_prefill, shares, engine, step_time, "prefill")
        replicas = self.engines - self.num_prefill
        return [*prefill, self.pool("decode", engine, decoder, role="decode", replicas=replicas, models=[*shares])]

    def _isolated(self, shares: Mapping[str, float], engine: EngineSpec, step_time: StepTimeSpec) -> list[PoolSpec]:
        """A pool for each model, on equal parts of devices where there are fewer devices than models."""
        parts = -(-len(shares) // self.engines)
        if parts > 1:
            if engine.num_gpu_blocks is not None:
                expected = f"expected kv_memory in its place, since {parts} models share the memory of a device"
                raise BadInput(expected, field="engine.num_gpu_blocks", value=engine.num_gpu_blocks)
            from scenarios.memory import KVMemorySpec

            memory = engine.kv_memory or KVMemorySpec()
            part = memory.model_copy(update={"gpu_memory_utilization": memory.gpu_memory_utilization / parts})
            engine = engine.model_copy(update={"kv_memory": part})
        replicas = replicas_by_share(shares, self.engines * parts)
        return [
            self.pool(model, engine, step_time, role="both", replicas=count, models=[model], engines_per_device=parts)
            for model, count in replicas.items()
        ]

    def _swapping(
        self, name: str, engines: int, shares: Mapping[str, float], engine: EngineSpec,
        step_time: StepTimeSpec, role: Role = "both",
    ) -> list[PoolSpec]:  # fmt: skip
        """A pool for each engine, which swaps its share of the models, or for each model where engines suffice."""
        if len(shares) <= engines:
            return [
                self.pool(f"{name}-{model}", engine, step_time, role=role, replicas=count, models=[model])
                for model, count in replicas_by_share(shares, engines).items()
            ]
        pools = []
        # Prefill engines can keep equal numbers of models in memory; one that swaps for decodes is better with few.
        room = -(-len(shares) // engines) if role == "prefill" else len(shares)
        for i, models in enumerate(balanced_groups(shares, engines, room)):
            assert self.swapping is not None, "the section is required of strategies that swap"
            swapping = self.swapping.model_copy(update={"models": len(models)})
            settings = engine.model_copy(update={"weight_swapping": swapping}) if len(models) > 1 else engine
            pools.append(self.pool(f"{name}-{i}", settings, step_time, role=role, replicas=1, models=models))
        return pools


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


def _with_layout(system: Any) -> Any:
    """Add the layout to a section that names none: the one that has its fields, else the default one."""
    if not isinstance(system, dict) or "layout" in system:
        return system
    if "pools" in system:
        return {"layout": "pools", **system}
    if "strategy" in system:
        return {"layout": "many_models", **system}
    foreign = DisaggregatedSpec.model_fields.keys() - ColocatedSpec.model_fields.keys()
    return system if foreign & system.keys() else {"layout": "colocated", **system}


_BUILT_IN = dict(LAYOUTS)


def _check(section: Any, check_union: ValidatorFunctionWrapHandler) -> SystemSpec:
    """Read sections without a layout, and layouts that a plug-in has registered."""
    if isinstance(section, SystemSpec):
        return section
    section = _with_layout(section)
    name = section.get("layout") if isinstance(section, dict) else None
    if isinstance(name, str) and name in LAYOUTS and name not in _BUILT_IN:
        return checked(LAYOUTS[name], section, None)
    spec: SystemSpec = check_union(section)
    return spec


if TYPE_CHECKING:
    AnySystemSpec: TypeAlias = SystemSpec
else:
    AnySystemSpec = Annotated[
        SerializeAsAny[functools.reduce(operator.or_, _BUILT_IN.values())],
        Field(discriminator="layout"),
        WrapValidator(_check),
    ]
    """The `system` section: a union of all layouts, told apart by their names."""


class FailureSpec(Strict):
    """An outage: an engine is down from `at` for `duration` seconds, and its requests continue elsewhere."""

    engine: str
    at: NonNegativeFloat
    duration: PositiveFloat
