"""Checks that the memory of a scenario and its step times are of the same model on as many devices."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latency_models.io.builtin_files import builtin_names
from latency_models.step_time import StepTime
from scenarios.engine import EngineSpec
from scenarios.pools import DeviceSpec
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.deployment.models import Model


def describe_origin(step_time: StepTime) -> dict[str, Any]:
    """The entries of a document on the origin of the step times; empty if the source does not state it."""
    origin = step_time.measured_deployment()
    if origin is None:
        return {}
    measured = {"measured_on": origin.origin.document()} if origin.measured else {}
    return {**measured, **({"notes": list(origin.notes)} if origin.notes else {})}


def check_deployment(
    engine: EngineSpec, base: Path, step_time: StepTime, engine_section: str = "engine", section: str = "step_time"
) -> None:
    """Compare step times with `engine.kv_memory`, and their tables with the model that they are used for.

    Args:
        engine_section, section: where the settings of the engine and the step times stand in the scenario.

    Raises:
        BadInput: another model, or another number of devices.
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


def check_device(device: DeviceSpec | None, ranks: int, step_time: StepTime, section: str) -> None:
    """Compare the devices that a pool states with those that its step times are for.

    Args:
        ranks: data-parallel ranks of an engine, each of which has as many devices. section: where the pool stands.

    Raises:
        BadInput: another number of devices, or another GPU, as far as both are known.
    """
    measured = step_time.measured_deployment()
    if device is None or measured is None:
        return
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
    from latency_models.origin import plain_name

    builtin = next(
        (candidate for candidate in builtin_names("models") if plain_name(candidate) == plain_name(name)), None
    )
    return None if builtin is None else _load_model(builtin)
