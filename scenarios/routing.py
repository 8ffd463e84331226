"""Routers of a serving system: `system.routing` and `system.kv_events`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, PositiveInt

from latency_models.io.config_io import Strict
from scenarios.limits import VirtualNodes
from scenarios.registered import registered
from schedulers.routing import ROUTERS, Draw, Router
from workloads.errors import BadInput

RouterName = Annotated[str, registered(ROUTERS)]


class RouterSpec(Strict):
    """A router with parameters; the fields that are left out have the router's own defaults.

    Attributes:
        policy: its name. weight: of the cached prefix against the load (prefix_aware). load_factor: most load of an
            engine, in means (session_affinity, consistent_hashing). virtual_nodes: places of an engine on the ring
            (consistent_hashing). max_sessions: that are remembered (session_affinity). A plug-in's router may have
            others.
    """

    model_config = ConfigDict(extra="allow")

    policy: RouterName
    weight: NonNegativeFloat | None = None
    load_factor: Annotated[float, Field(ge=1)] | None = None
    virtual_nodes: VirtualNodes | None = None
    max_sessions: PositiveInt | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that were given, by name."""
        given = {name: value for name, value in self if name != "policy" and value is not None}
        return given | (self.model_extra or {})


class KVEventsSpec(Strict):
    """Routers know of prefix caches by events, which take `delay` seconds (vLLM's `kv_events_config`)."""

    delay: NonNegativeFloat = 0.0


def make_router(routing: str | RouterSpec, draw: Draw) -> Router:
    """A new router.

    Raises:
        BadInput: parameters that it does not take.
    """
    if isinstance(routing, str):
        return ROUTERS.select(routing)(draw)
    try:
        return ROUTERS.select(routing.policy)(draw, **routing.parameters)
    except (TypeError, ValueError) as error:
        raise BadInput(f"expected parameters of {routing.policy}: {error}", field="system.routing") from None


def router_name(routing: str | RouterSpec) -> str:
    """The name of a router that is given with or without parameters."""
    return routing if isinstance(routing, str) else routing.policy


def _check(routing: str | RouterSpec) -> str | RouterSpec:
    if isinstance(routing, str):
        if routing not in ROUTERS:
            raise BadInput(f"expected one of {', '.join(ROUTERS)}", value=routing)
    elif routing.parameters:
        try:
            ROUTERS.select(routing.policy)(lambda size: 0, **routing.parameters)
        except (TypeError, ValueError) as error:
            raise BadInput(f"expected parameters of {routing.policy}: {error}") from None
    return routing


Routing = Annotated[str | RouterSpec, AfterValidator(_check)]
"""The name of a router, or a section with its name and parameters."""
