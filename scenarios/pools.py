"""Pools of engines, of which every system consists, and the routers before them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.io.config_io import Strict
from latency_models.sources.registry import StepTimeSpec
from scenarios.engine import EngineSpec
from scenarios.fields import Engines, Name, PolicySpec, VirtualNodes, make_policy, name_or_section, named, registered
from schedulers.routing import ROUTERS, Draw, Router

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
