"""Pools of engines, of which every system consists, and the routers before them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.io.config_io import Strict
from latency_models.sources.registry import StepTimeSpec
from scenarios.engine import EngineSpec
from scenarios.limits import Engines, Name, VirtualNodes
from scenarios.policies import PolicySpec, make_policy, name_or_section, named, registered
from schedulers.routing import ROUTERS, Draw, Router

RouterName = Annotated[str, registered(ROUTERS)]


class RouterSpec(PolicySpec):
    """A router with parameters.

    Attributes:
        policy: its name. weight: of the cached prefix against the load (prefix_aware). load_factor: most load of an
            engine, in means (session_affinity, consistent_hashing). virtual_nodes: places of an engine on the ring
            (consistent_hashing). max_sessions: that are remembered (session_affinity).
    """

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
    """A new router."""
    return make_policy(ROUTERS, *named(routing), draw, field="system.routing")


def router_name(routing: str | RouterSpec) -> str:
    """The name of a router that is given with or without parameters."""
    return named(routing)[0]


Role = Literal["both", "prefill", "decode"]
Serves = Literal["each", "all"]
Strategy = Literal["isolated", "sun", "qsun", "multi_lora", "swapping"]
"""Ways in which the models of a fleet share its engines; see `scenarios.many_models`."""

SHARED_DECODER = ("sun", "qsun")
"""Strategies with one decoder for all models."""


class DeviceSpec(Strict):
    """The devices of one engine of a pool.

    Attributes:
        type: a name, such as that of a GPU. count: devices of one engine. price_per_hour: of one device, in any
            currency.
    """

    type: str
    count: PositiveInt = 1
    price_per_hour: NonNegativeFloat | None = None


class PoolSpec(Strict):
    """Engines that are alike.

    Attributes:
        role: `prefill` engines send their caches to `decode` engines; `both`: each engine does both.
        replicas: engines. models: `all`: they serve every model; `each`: there are so many for each model; or a list of
            the models that they serve.
        speed: tokens of prompts and answers that one engine works off a second, for routers that weigh it. Only
            proportions count. Default: from step times and the workload's mean lengths.
        engine, step_time: settings and durations of their own. In a file, fields and sections that are left out are
            those of the scenario.
        engines_per_device: engines that have an equal part of a device each, as with MIG: its memory is what
            `engine` says, and its steps take so many times as long.
    """

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
    """Fill a document's pools: missing settings of a pool are those of the scenario.

    `num_gpu_blocks` and `kv_memory` of a pool replace both of the scenario's.
    """
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
