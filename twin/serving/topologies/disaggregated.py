"""Prefill engines that send KV caches to decode engines; both may serve one model, some, or all (SUN 3.2.3)."""

from __future__ import annotations

from twin.serving.link import Link, LinkSpeed
from twin.serving.system import System
from twin.serving.topologies.parts import Parts


def build(parts: Parts) -> System:
    """A system with prefill and decode pools, and a link that leaves each prefill engine, or one for all."""
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
