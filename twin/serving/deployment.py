"""Whether the memory of a scenario and its step times speak of the same model on as many devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.deployment.models import Model, load_model
from latency_models.io.builtin_files import builtin_names
from latency_models.sources.origin import Origin, plain_name
from latency_models.step_time import StepTime
from scenarios.engine import EngineSpec
from workloads.errors import BadInput


@dataclass(frozen=True, slots=True)
class Measured:
    """What step times are for.

    Attributes:
        model: the model that they are computed with; None where they are sums over its layers already.
        ranks: ranks that share a layer; None where that is not known, or where experts are split otherwise.
    """

    origin: Origin
    model: Model | None
    ranks: int | None
    notes: tuple[str, ...] = ()


def measured(step_time: StepTime) -> Measured | None:
    """What the step times are for; None for sources that do not say."""
    from latency_models.sources.aiconfigurator.step_time import AiconfiguratorStepTime
    from latency_models.sources.kernel_tables.step_time import KernelTableStepTime

    match step_time:
        case AiconfiguratorStepTime():
            origin = step_time.origin
            return Measured(origin, None, origin.tensor_parallel, step_time.kernels.notes)
        case KernelTableStepTime():
            settings = step_time.settings
            ranks = None if settings.expert_parallel else settings.tensor_parallel
            return Measured(step_time.origin, step_time.model, ranks)
        case _:
            return None


def describe_origin(step_time: StepTime) -> dict[str, Any]:
    """What a document says of what the step times were measured on; empty where the source does not say."""
    known = measured(step_time)
    if known is None:
        return {}
    return {"measured_on": known.origin.document(), **({"notes": list(known.notes)} if known.notes else {})}


def check_deployment(
    engine: EngineSpec, base: Path, step_time: StepTime, engine_section: str = "engine", section: str = "step_time"
) -> None:
    """Compare step times with `engine.kv_memory`, and their tables with the model that they are used for.

    Args:
        engine_section, section: where the settings of the engine and the step times stand in the scenario.

    Raises:
        BadInput: another model, or another number of devices.
    """
    known, memory = measured(step_time), engine.kv_memory
    if known is None:
        return
    tables = _builtin(known.origin.model)
    if known.model is not None and tables is not None and not _alike(known.model, tables):
        expected = f"expected {tables.name}, whose kernels were measured"
        raise BadInput(expected, field=f"{section}.model", value=known.model.name)
    if memory is None:
        return
    if known.ranks is not None and memory.tensor_parallel_size != known.ranks:
        expected = f"expected {known.ranks}, as {section} is for"
        field = f"{engine_section}.kv_memory.tensor_parallel_size"
        raise BadInput(expected, field=field, value=memory.tensor_parallel_size)
    model = known.model or tables
    if model is not None and not _alike(load_model(memory.model, base), model):
        expected = f"expected {model.name}, which {section} is for"
        raise BadInput(expected, field=f"{engine_section}.kv_memory.model", value=memory.model)


def _alike(one: Model, other: Model) -> bool:
    """Whether two models have the same layers, whatever they are called and wherever they were found."""
    names = {"name", "source", "published_parameters"}
    return one.model_dump(exclude=names) == other.model_dump(exclude=names)


def _builtin(name: str) -> Model | None:
    """The built-in model of a name, as any owner and case spells it."""
    found = next((known for known in builtin_names("models") if plain_name(known) == plain_name(name)), None)
    return None if found is None else load_model(found)
