"""The pools of a plan: their engines' names, schedulers, step times and devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.sources.registry import StepTimeSpec
from latency_models.step_time import StepTime
from latency_models.unknowns import Unknown
from latency_models.wrapped import DraftedStepTime
from scenarios.engine import SchedulerPlan
from scenarios.pools import DeviceSpec, PoolSpec
from scenarios.serving import ServingScenario
from schedulers.engine_config import INSTALLED_VLLM
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import LockstepGroup, PipelinedEngineCore
from twin.serving.engine.installed_vllm import installed_core
from twin.serving.engine.speculation import Acceptance, SimulatedSpeculation
from twin.serving.plan.deployment import check_deployment, check_device, describe_origin
from workloads.errors import BadInput

if TYPE_CHECKING:
    from scenarios.steps import SpeculativeSpec
    from twin.serving.engine.draft_outcomes import DraftOutcomes

KV_BLOCKS = Unknown(
    "kv_blocks",
    "KV blocks, computed from memory that is assumed for activations and graphs",
    "assumed",
    0.05,
    "num_gpu_blocks in the engine's log",
)
"""Two GiB of activations and graphs more or less are 3 % of the cache of an 8B model on 96 GB, 8 % of a 70B model's."""

EnginesByModel = dict[str, tuple[str, ...]]
"""Names of the engines that may get a model's requests. Models whose requests are routed together share a tuple."""


@dataclass(frozen=True)
class PlannedPool:
    """Engines that are alike.

    Attributes:
        spec: the pool in the scenario. scheduler: the plan of each engine's scheduler.
        engines: names of the engines that serve each model, for the models that it serves.
        draft_outcomes: measured outcomes of drafts; None: the scenario states shares, or nothing is drafted.
    """

    spec: PoolSpec
    scheduler: SchedulerPlan
    step_time: StepTime
    engines: dict[str, list[str]]
    draft_outcomes: DraftOutcomes | None = None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for names in self.engines.values() for name in names))

    def unknowns(self) -> tuple[Unknown, ...]:
        """Unknowns of its step times, and of its memory where that was computed."""
        computed = self.spec.engine.num_gpu_blocks is None
        return (*self.step_time.unknowns(), *((KV_BLOCKS,) if computed else ()))

    def at(self, scores: Mapping[str, float]) -> PlannedPool:
        """The same pool at these scores of its unknowns."""
        config, score = self.scheduler.config, scores.get(KV_BLOCKS.name, 0.0)
        if score and KV_BLOCKS in self.unknowns():
            blocks = max(round(config.num_gpu_blocks * KV_BLOCKS.factor(score)), 1)
            config = replace(config, num_gpu_blocks=blocks)
        return replace(self, scheduler=replace(self.scheduler, config=config), step_time=self.step_time.vary(scores))

    def make_core(self) -> EngineCore | LockstepGroup:
        """The scheduler of a new engine: one for each data-parallel rank."""
        config = self.scheduler.config
        if config.scheduler == INSTALLED_VLLM:
            if self.spec.role != "both":
                expected = f"expected both with engine.scheduler {INSTALLED_VLLM}"
                raise BadInput(expected, field="system.pools.role", value=self.spec.role)
            return installed_core(config, self.scheduler.depth > 1)
        ranks = self.spec.engine.data_parallel_size
        return LockstepGroup(self.scheduler.make_core, ranks) if ranks > 1 else self.scheduler.make_core()

    def make_pipeline(self) -> PipelinedEngineCore:
        """The scheduler of a new engine that is a pipeline."""
        core = self.scheduler.make_core()
        assert isinstance(core, PipelinedEngineCore)
        return core

    def make_speculation(self, seed: int, resampled: int = 0) -> SimulatedSpeculation | None:
        """The outcomes of a new engine's drafts; None if its scheduler does not speculate.

        `resampled`: the number of a draw of other outcomes that might have been measured; 0: those that were.
        """
        spec = self.scheduler.speculation
        if spec is None:
            return None
        by_model = {model: tuple(shares) for model, shares in spec.acceptance_by_model.items()}
        measured = self.draft_outcomes
        if measured is not None and resampled:
            measured = measured.resampled(resampled)
        acceptance = Acceptance(spec.shares() or (), by_model, spec.proposed, measured)
        return SimulatedSpeculation(acceptance, spec.num_speculative_tokens, seed)

    def describe(self) -> dict[str, Any]:
        """Its entry in a document."""
        return {
            "name": self.spec.name,
            "role": self.spec.role,
            "models": self.spec.models,
            "engines": len(self.names),
            "num_gpu_blocks": self.scheduler.config.num_gpu_blocks,
            "step_time": self._origin(),
            "device": self.spec.device.model_dump() if self.spec.device else None,
        }

    def _origin(self) -> dict[str, Any]:
        """The origin of its step times, with notes on what its engines share and on what is assumed of them."""
        origin, parts = describe_origin(self.step_time), self.spec.engines_per_device
        lora = self.spec.engine.lora_config
        notes = [*origin.get("notes", ()), *([lora.assumed_cost] if lora and lora.assumed_cost else [])]
        if parts > 1:
            notes.append(
                f"isolated means engines of their own for each model: {parts} of them divide a device, each with an "
                "equal part of its memory and speed"
            )
        return self.spec.step_time.provenance() | origin | ({"notes": notes} if notes else {})


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
            pool.step_time.check_stages(pool.engine.pipeline_parallel_size)
        engine_section = scenario.system.section(i, "engine")
        with _named(engine_section, "engine"):
            scheduler = pool.engine.build(base, prefix_id_tokens, step_time)
        speculates = pool.engine.speculative_config
        if speculates is not None:
            step_time = _drafted(speculates, step_time, build, pool.engine_names(scenario.model_names), engine_section)
        with _named(engine_section, "engine"):
            step_time = pool.engine.with_models(step_time, base)
        if pool.engines_per_device > 1:
            from latency_models.wrapped import PartitionedStepTime

            step_time = PartitionedStepTime(step_time, pool.engines_per_device)
        check_deployment(pool.engine, base, step_time, engine_section, section)
        check_device(pool.device, pool.engine.data_parallel_size, step_time, f"system.pools.{pool.name}")
        outcomes = None if speculates is None else _draft_outcomes(speculates, base)
        planned.append(PlannedPool(pool, scheduler, step_time, pool.engine_names(scenario.model_names), outcomes))
    return planned


def engines_by_model(pools: Iterable[PlannedPool]) -> EnginesByModel:
    """The engines of all pools that serve each model, in the order of the pools."""
    names: dict[str, list[list[str]]] = {}
    for pool in pools:
        for model, engines in pool.engines.items():
            names.setdefault(model, []).append(engines)
    tuples: dict[tuple[int, ...], tuple[str, ...]] = {}
    by_model: EnginesByModel = {}
    for model, lists in names.items():
        key = tuple(map(id, lists))
        if key not in tuples:
            tuples[key] = tuple(name for engines in lists for name in engines)
        by_model[model] = tuples[key]
    return by_model


def _drafted(
    spec: SpeculativeSpec, step_time: StepTime, build: Callable[[StepTimeSpec], StepTime],
    engines: Mapping[str, list[str]], section: str,
) -> StepTime:  # fmt: skip
    """Step times with those of the draft model, where there is one.

    Raises:
        BadInput: the scenario does not say how many drafts are right, or names a model that the pool does not serve.
    """
    field = f"{section}.speculative_config"
    for model in spec.acceptance_by_model:
        if model not in engines:
            raise BadInput(f"expected one of {', '.join(engines)}", field=f"{field}.acceptance_by_model", value=model)
    if (
        spec.shares() is None
        and spec.acceptance_profile is None
        and any(model not in spec.acceptance_by_model for model in engines)
    ):
        expected = (
            "expected acceptance, acceptance_by_position, acceptance_profile, or acceptance_by_model of every model"
        )
        raise BadInput(expected, field=field)
    if spec.draft_step_time is None:
        return step_time
    with _named(f"{field}.draft_step_time", "step_time"):
        return DraftedStepTime(step_time, build(spec.draft_step_time))


def _draft_outcomes(spec: SpeculativeSpec, base: Path) -> DraftOutcomes | None:
    """The outcomes of `acceptance_profile`, if there is one.

    Raises:
        BadInput: a file that cannot be used, or whose drafts were shorter.
    """
    if spec.acceptance_profile is None:
        return None
    from twin.serving.engine.draft_outcomes import read_draft_outcomes  # few scenarios have such a file

    file = base / spec.acceptance_profile
    content, outcomes = read_draft_outcomes(file)
    if content.num_speculative_tokens < spec.num_speculative_tokens:
        expected = f"expected at least engine.speculative_config.num_speculative_tokens ({spec.num_speculative_tokens})"
        raise BadInput(expected, file=file, field="num_speculative_tokens", value=content.num_speculative_tokens)
    return outcomes


def describe_devices(pools: Sequence[PlannedPool]) -> dict[str, Any] | None:
    """Devices in total and of each type, and their price per hour; None if those of a pool are not known.

    They are those that the pool states, else those that its step times were computed for. The price is None where that
    of a device is not given. Of a pool that is autoscaled, they are those of as many engines as there may be at most.
    """
    by_type: dict[str, Fraction] = {}
    cost: float | None = 0.0
    for pool in pools:
        device = devices_of(pool)
        if device is None:
            return None
        count = Fraction(len(pool.names) * device.count, pool.spec.engines_per_device)
        by_type[device.type] = by_type.get(device.type, Fraction()) + count
        price = device.price_per_hour
        cost = None if cost is None or price is None else cost + float(count) * price
    counts = {name: ceil(count) for name, count in by_type.items()}
    return {"total": sum(counts.values()), "by_type": counts, "cost_per_hour": cost}


def devices_of(pool: PlannedPool) -> DeviceSpec | None:
    """The devices of one engine of a pool; None if they are not known."""
    return pool.spec.device or _computed_for(pool)


def _computed_for(pool: PlannedPool) -> DeviceSpec | None:
    """The devices of computed step times."""
    measured = pool.step_time.measured_deployment()
    return DeviceSpec(type=measured.device, count=measured.devices) if measured and measured.devices else None


def cost_per_million_tokens(devices: dict[str, Any] | None, output_throughput: float | None) -> float | None:
    """The price of a million output tokens at a throughput in tokens/s; None where devices have no price."""
    if devices is None or devices["cost_per_hour"] is None or not output_throughput:
        return None
    return float(devices["cost_per_hour"]) / 3600 / output_throughput * 1e6


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
