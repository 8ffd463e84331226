"""The pools of a plan: their engines' names, schedulers, step times and devices, which are checked to go together."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.io.files import builtin_names
from latency_models.sources.registry import StepTimeSpec
from latency_models.step_time import MeasuredDeployment, StepTime, Unknown
from latency_models.wrapped import DraftedStepTime
from scenarios.engine import DeviceSpec, EngineSpec, PoolSpec, SchedulerPlan
from scenarios.serving import ServingScenario
from schedulers.engine_config import INSTALLED_VLLM
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import LockstepGroup, PipelinedEngineCore
from twin.serving.engine.installed_vllm import installed_core
from twin.serving.engine.speculation import Acceptance, SimulatedSpeculation
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.deployment.models import Model
    from scenarios.steps import SpeculativeSpec
    from twin.serving.engine.draft_outcomes import DraftOutcomes


def check_deployment(
    engine: EngineSpec, base: Path, step_time: StepTime, engine_section: str = "engine", section: str = "step_time"
) -> None:
    """Refuse another model, or number of devices, in `engine.kv_memory` than step times and their tables are for.

    `engine_section`, `section`: where the settings of the engine and the step times stand in the scenario.
    """
    measured, memory = step_time.measured_deployment(), engine.kv_memory
    if measured is None:
        return
    tables = _builtin(measured.origin.model)
    if measured.model is not None and tables is not None and not _alike(measured.model, tables):
        expected = f"expected {tables.name}, whose kernels were measured"
        raise BadInput(expected, field=f"{section}.model", value=measured.model.name)
    if memory is None or memory.model is None:
        return
    if measured.ranks is not None and memory.tensor_parallel_size != measured.ranks:
        expected = f"expected {measured.ranks}, as {section} is for"
        field = f"{engine_section}.kv_memory.tensor_parallel_size"
        raise BadInput(expected, field=field, value=memory.tensor_parallel_size)
    model = measured.model or tables
    if model is not None and not _alike(_load_model(memory.model, base), model):
        expected = f"expected {model.name}, which {section} is for"
        raise BadInput(expected, field=f"{engine_section}.kv_memory.model", value=memory.model)


def _load_model(name: str, base: Path = Path()) -> Model:
    """The model of a name or file. Its module is imported here, since few scenarios name a model."""
    from latency_models.deployment.hugging_face import any_model

    return any_model(name, base)


def _check_device(device: DeviceSpec, ranks: int, measured: MeasuredDeployment, section: str) -> None:
    """Refuse another number of devices, or another GPU, than step times are for, as far as both are known.

    `ranks`: data-parallel ranks of an engine, each of which has as many devices. `section`: where the pool stands.
    """
    if measured.ranks is not None and device.count != measured.ranks * ranks:
        expected = f"expected {measured.ranks * ranks}, as its step_time is for"
        raise BadInput(expected, field=f"{section}.device.count", value=device.count)
    gpu = measured.origin.gpu or measured.device
    if (stated := _product(device.type)) and (product := _product(gpu)) and stated != product:
        expected = f"expected {gpu}, which its step_time is for"
        raise BadInput(expected, field=f"{section}.device.type", value=device.type)


def _product(name: str) -> str:
    """The part of a GPU's name that tells it from others, such as H200 or L40S; "" where none is found."""
    match = re.search(r"(?<![a-z0-9])(gb|mi|[abhl])(\d{2,3}[a-z]?)(?![0-9])", name.lower())
    return match.group(0) if match else ""


def _alike(model: Model, reference: Model) -> bool:
    """True if two models have the same layers, whatever their names, sources and formats."""
    names = {"name", "source", "published_parameters", "checkpoints"}
    return model.model_dump(exclude=names) == reference.model_dump(exclude=names)


@functools.cache  # the built-in files stay as they are, and a sweep asks in each of its points
def _builtin(name: str) -> Model | None:
    """The built-in model of a name, with any owner and in any case."""
    from latency_models.step_time import plain_name

    builtin = next(
        (candidate for candidate in builtin_names("models") if plain_name(candidate) == plain_name(name)), None
    )
    return None if builtin is None else _load_model(builtin)


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
        """Its entry in a document; notes on its step times say what its engines share and what is assumed of them."""
        measured, parts = self.step_time.measured_deployment(), self.spec.engines_per_device
        lora = self.spec.engine.lora_config
        origin = {"measured_on": measured.origin.document()} if measured and measured.measured else {}
        notes = [*(measured.notes if measured else ()), *([lora.assumed_cost] if lora and lora.assumed_cost else [])]
        if parts > 1:
            notes.append(
                f"isolated means engines of their own for each model: {parts} of them divide a device, each with an "
                "equal part of its memory and speed"
            )
        return {
            "name": self.spec.name,
            "role": self.spec.role,
            "models": self.spec.models,
            "engines": len(self.names),
            "num_gpu_blocks": self.scheduler.config.num_gpu_blocks,
            "step_time": self.spec.step_time.provenance() | origin | ({"notes": notes} if notes else {}),
            "device": self.spec.device.model_dump() if self.spec.device else None,
        }


def plan_pools(
    scenario: ServingScenario, base: Path, prefix_id_tokens: int | None, models: dict[str, StepTime]
) -> list[PlannedPool]:
    """The pools of a scenario, those that prefill first; `BadInput` for settings that contradict each other.

    `prefix_id_tokens`: as in `EngineSpec.build`. `models`: step-time models by their sections, which are added to.
    """

    def build(spec: StepTimeSpec) -> StepTime:
        key = spec.model_dump_json()
        if key not in models:
            models[key] = spec.build(base)
        return models[key]

    planned = []
    for i, pool in enumerate(scenario.pools):
        section = scenario.system.section(i, "step_time")
        with _named(section, "step_time"):
            step_time = build(pool.step_time)
            pool.step_time.check_ranks(pool.engine.data_parallel_size)
            pool.step_time.check_stages(pool.engine.pipeline_parallel_size)
        engine_section = scenario.system.section(i, "engine")
        with _named(engine_section, "engine"):
            scheduler = pool.engine.build(base, prefix_id_tokens, step_time)
        speculates = pool.engine.speculative_config
        if speculates is not None:
            step_time = _drafted(
                speculates, step_time, build, pool.engine_names(scenario.workload.models.names), engine_section
            )
        with _named(engine_section, "engine"):
            step_time = pool.engine.with_models(step_time, base)
        if pool.engines_per_device > 1:
            from latency_models.wrapped import PartitionedStepTime

            step_time = PartitionedStepTime(step_time, pool.engines_per_device)
        measured = step_time.measured_deployment()
        if measured is not None:
            check_deployment(pool.engine, base, step_time, engine_section, section)
        if measured is not None and pool.device is not None:
            _check_device(pool.device, pool.engine.data_parallel_size, measured, f"system.pools.{pool.name}")
        outcomes = None if speculates is None else _draft_outcomes(speculates, base)
        planned.append(
            PlannedPool(pool, scheduler, step_time, pool.engine_names(scenario.workload.models.names), outcomes)
        )
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
    """Step times with those of the draft model, where there is one; `BadInput` for models of unknown acceptance."""
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
    """The outcomes of `acceptance_profile`, if there is one; `BadInput` for a file whose drafts were shorter."""
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
    if pool.spec.device:
        return pool.spec.device
    measured = pool.step_time.measured_deployment()  # of computed step times
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
