"""Refuses to test compiled modules that are older than their sources; hypothesis does not look at the clock."""

from __future__ import annotations

import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]

# Each of pytest-xdist's workers has one core, and inherits this. More threads of OpenBLAS and PyTorch would spin while
# they wait.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A machine that is busy with other work makes no test fail, and the same commit passes or fails every time: properties
# take the same examples in each run. `.ci/run --all` takes the second profile, with twelve times as many, drawn anew.
for profile, examples in (("suite", 50), ("all", 600)):
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=profile == "suite",
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """End the session with one line if a module was changed since it was compiled in place."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for extension in (*ROOT.glob(f"schedulers/*{suffix}"), *ROOT.glob(f"twin/**/*{suffix}")):
        source = extension.with_name(extension.name.removesuffix(suffix) + ".py")
        if not source.exists() or source.stat().st_mtime > extension.stat().st_mtime:
            again = "SERVING_TWIN_COMPILE=1 pip install -e . --no-deps"
            raise pytest.UsageError(f"{extension} is older than its source; compile again ({again}) or remove it")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make no garbage worth looking for, and what they bring is left out of every later collection.

    A full one takes a third of a second with it, and many tests ask for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Types a command that must refuse its input: exit code 2, and nothing but the one line that is returned."""

    def line(*words: object) -> str:
        from twin.cli import run

        capsys.readouterr()
        assert run([str(word) for word in words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (message,) = captured.err.strip().splitlines()
        return message

    return line


@pytest.fixture
def own_registries() -> Generator[None, None, None]:
    """Remove a test's plug-ins before the next. Built-in sources come before: they register only then."""
    from latency_models.sources.registry import SOURCES, built_in_sources
    from schedulers.bundle_slots import REFILL_POLICIES
    from schedulers.routing import ROUTERS
    from schedulers.scheduling_policies import PREEMPTION_POLICIES, SCHEDULING_POLICIES
    from schedulers.step_policies import CHUNK_POLICIES
    from workloads.traces import TRACE_FORMATS

    built_in_sources()
    policies = (CHUNK_POLICIES, PREEMPTION_POLICIES, REFILL_POLICIES, ROUTERS, SCHEDULING_POLICIES)
    registries: list[dict[str, Any]] = [*policies, SOURCES, TRACE_FORMATS]
    before = [dict(registry) for registry in registries]
    yield
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)
    for name in [name for name in sys.modules if name.startswith("twin_plugin_")]:
        del sys.modules[name]
