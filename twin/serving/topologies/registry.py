"""Topologies by the name that a `system` section has for them (`SystemSpec.topology`).

A plug-in adds one with a layout of its own: a subclass of `scenarios.system.SystemSpec` in `LAYOUTS`, and here a
function that builds a system from the parts.
"""

from __future__ import annotations

from collections.abc import Callable

from twin.serving.system import System
from twin.serving.topologies import colocated, disaggregated
from twin.serving.topologies.parts import Parts
from workloads.registry import Registry

TOPOLOGIES: Registry[Callable[[Parts], System]] = Registry(colocated=colocated.build, disaggregated=disaggregated.build)
