"""Engines that prefill and decode."""

from __future__ import annotations

from twin.serving.system import System
from twin.serving.topologies.parts import Parts


def build(parts: Parts) -> System:
    """A system whose engines compute each request from its prompt to its last token."""
    parts.make_engines()
    pools = parts.make_pools(parts.plan.prefill_engines)
    return System(parts.env, pools, {}, {}, **parts.plan.scenario.system.frontend.model_dump())
