"""Topologies, which make systems of pools, routers and links, by the name that a `system` section has for them.

A plug-in adds one with a layout of its own: a subclass of `scenarios.system.SystemSpec` in `LAYOUTS`, and here a
function that builds a system from the parts (`SystemSpec.topology`).
"""

from __future__ import annotations

from collections.abc import Callable

from twin.serving.system.link import Link, LinkSpeed
from twin.serving.system.parts import Parts
from twin.serving.system.system import System
from workloads.registry import Registry


def colocated(parts: Parts) -> System:
    """A system whose engines compute each request from its prompt to its last token."""
    parts.make_engines()
    pools = parts.make_pools(parts.plan.prefill_engines)
    return System(parts.env, pools, {}, {}, **parts.plan.scenario.system.frontend.model_dump())


def disaggregated(parts: Parts) -> System:
    """A system of prefill engines that send KV caches to decode engines, over a link of each or one for all.

    Both kinds may serve one model, some, or all (SUN 3.2.3).
    """
    spec = parts.plan.scenario.system.kv_link
    assert spec is not None, "a system of prefill and decode pools has a link"
    parts.make_engines()
    prefill = parts.make_pools(parts.plan.prefill_engines)
    decode = parts.make_pools(parts.plan.decode_engines)
    speed = LinkSpeed(spec.bandwidth, spec.latency, spec.bytes_per_token)
    shared = Link(parts.env, speed)
    names = dict.fromkeys(name for engines in parts.plan.prefill_engines.values() for name in engines)
    links = {name: shared if spec.shared else Link(parts.env, speed) for name in names}
    frontend = parts.plan.scenario.system.frontend.model_dump()
    return System(parts.env, prefill, decode, links, **frontend, with_chunks=spec.transfer == "with_chunks")


TOPOLOGIES: Registry[Callable[[Parts], System]] = Registry(colocated=colocated, disaggregated=disaggregated)
