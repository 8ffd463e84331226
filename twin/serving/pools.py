"""The pools of a plan: their engines' names, schedulers and step times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.sources.registry import StepTimeSpec
from latency_models.step_time import StepTime
from scenarios.engine import SchedulerPlan
from scenarios.pools import PoolSpec
from scenarios.serving import ServingScenario
from schedulers.engine_core import EngineCore
from schedulers.lockstep import LockstepGroup
from twin.serving.deployment import check_deployment, describe_origin
from workloads.errors import BadInput

EnginesByModel = dict[str, tuple[str, ...]]
"""Names of the engines that may get a model's requests. Models whose requests are routed together share a tuple."""


@dataclass(frozen=True)
class PlannedPool:
    """Engines that are alike.

    Attributes:
        spec: the pool in the scenario. scheduler: the plan of each engine's scheduler.
        engines: names of the engines that serve each model, for the models that it serves.
    """

    spec: PoolSpec
    scheduler: SchedulerPlan
    step_time: StepTime
    engines: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        """The names of its engines."""
        return list(dict.fromkeys(name for names in self.engines.values() for name in names))

    def make_core(self) -> EngineCore | LockstepGroup:
        """The scheduler of a new engine: one for each data-parallel rank."""
        ranks = self.spec.engine.data_parallel_size
        return LockstepGroup(self.scheduler.make_core, ranks) if ranks > 1 else self.scheduler.make_core()

    def describe(self) -> dict[str, Any]:
        """Its entry in a document."""
        return {
            "name": self.spec.name,
            "role": self.spec.role,
            "models": self.spec.models,
            "engines": len(self.names),
            "num_gpu_blocks": self.scheduler.config.num_gpu_blocks,
            "step_time": self.spec.step_time.provenance() | describe_origin(self.step_time),
            "device": self.spec.device.model_dump() if self.spec.device else None,
        }


def plan_pools(
    scenario: ServingScenario, base: Path, prefix_id_tokens: int | None, build: Callable[[StepTimeSpec], StepTime]
) -> list[PlannedPool]:
    """The pools of a scenario, those that prefill first.

    Args:
        prefix_id_tokens: as in `EngineSpec.build`. build: makes a model of a `step_time` section.

    Raises:
        BadInput: settings of a pool that cannot be used, or contradict each other.
    """
    models: dict[str, StepTime] = {}
    planned = []
    for i, pool in enumerate(scenario.pools):
        section = scenario.system.section(i, "step_time")
        with _named(section, "step_time"):
            key = pool.step_time.model_dump_json()
            step_time = models[key] = models.get(key) or build(pool.step_time)
            pool.step_time.check_ranks(pool.engine.data_parallel_size)
        engine_section = scenario.system.section(i, "engine")
        with _named(engine_section, "engine"):
            scheduler = pool.engine.build(base, prefix_id_tokens, step_time)
        check_deployment(pool.engine, base, step_time, engine_section, section)
        planned.append(PlannedPool(pool, scheduler, step_time, pool.engine_names(scenario.model_names)))
    return planned


def engines_by_model(pools: Iterable[PlannedPool]) -> EnginesByModel:
    """The engines of all pools that serve each model, in the order of the pools."""
    names: dict[str, list[list[str]]] = {}
    for pool in pools:
        for model, engines in pool.engines.items():
            names.setdefault(model, []).append(engines)
    tuples: dict[tuple[int, ...], tuple[str, ...]] = {}
    found: EnginesByModel = {}
    for model, lists in names.items():
        key = tuple(map(id, lists))
        if key not in tuples:
            tuples[key] = tuple(name for engines in lists for name in engines)
        found[model] = tuples[key]
    return found


@contextlib.contextmanager
def _named(section: str, usual: str) -> Iterator[None]:
    """Name the section in which a pool's settings were given, in errors that name the usual one."""
    try:
        yield
    except BadInput as error:
        field = error.field or ""
        if section == usual or not (field == usual or field.startswith(f"{usual}.")):
            raise
        field = section + field.removeprefix(usual)
        raise BadInput(error.expected, value=error.value, field=field, file=error.file, line=error.line) from None
