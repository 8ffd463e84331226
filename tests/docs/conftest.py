"""A place to try the documentation in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from latency_models.sources.registry import SOURCES, built_in_sources
from schedulers.bundle_slots import REFILL_POLICIES
from schedulers.routing import ROUTERS
from schedulers.scheduling_policies import PREEMPTION_POLICIES, SCHEDULING_POLICIES
from schedulers.step_policies import CHUNK_POLICIES
from twin import process
from workloads.traces import TRACE_FORMATS

ROOT = Path(__file__).resolve().parents[2]
REGISTRIES: tuple[dict[str, Any], ...] = (
    CHUNK_POLICIES, PREEMPTION_POLICIES, REFILL_POLICIES, ROUTERS, SCHEDULING_POLICIES, SOURCES, TRACE_FORMATS,
)  # fmt: skip


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of examples/ in it as a reader has; commands use one process."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "usable_cores", lambda: 1)
    return tmp_path


@pytest.fixture
def own_registries() -> Iterator[None]:
    """Undo what an example registers. Built-in sources are imported before, since they register only then."""
    built_in_sources()
    before = [dict(registry) for registry in REGISTRIES]
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)
