"""Plug-ins of one test are gone in the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from schedulers.routing import ROUTERS
from schedulers.scheduling_policies import PREEMPTION_POLICIES, SCHEDULING_POLICIES
from schedulers.step_policies import CHUNK_POLICIES
from workloads.registry import Registry
from workloads.traces import TRACE_FORMATS

REGISTRIES: tuple[Registry[Any], ...] = (
    CHUNK_POLICIES, PREEMPTION_POLICIES, ROUTERS, SCHEDULING_POLICIES, TRACE_FORMATS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    entries = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, item in zip(REGISTRIES, entries, strict=True):
        registry.clear()
        registry.update(item)
    for name in [name for name in sys.modules if name.startswith("twin_plugin_")]:
        del sys.modules[name]
