"""The whole of `twin calibrate run`, but for how it is asked and shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from latency_models.hugging_face import model_from_config, read_config
from latency_models.measured_calibration import MeasuredCalibration
from live.calibration.assembling import assemble, pictures
from live.calibration.grid import CPU, CUDA, GROUPS, QUICK
from live.calibration.journal import Journal
from live.calibration.measuring import DTYPES, Measure, Plan, count, measure_all
from live.device import DEFAULT_DTYPE, device_name
from live.memory import keep_freed_memory
from workloads.errors import BadInput

__all__ = ["calibrate", "count", "make_plan", "open_journal", "pictures", "use_threads"]

DEFAULT_GROUPS = tuple(group for group in GROUPS if group != "communication")


def make_plan(
    config: Path, device: str, dtype: str | None = None, groups: Sequence[str] | None = None, *, quick: bool = False
) -> Plan:
    """What is to be measured.

    Raises:
        BadInput: a config.json that cannot be used, or an unknown device, type or group.
    """
    if device not in DEFAULT_DTYPE:
        raise BadInput("expected cpu or cuda", field="--device", value=device)
    device_name(device)
    dtype = dtype or DEFAULT_DTYPE[device]
    if dtype not in DTYPES:
        raise BadInput(f"expected one of {', '.join(DTYPES)}", field="--dtype", value=dtype)
    for group in groups or ():
        if group not in GROUPS:
            raise BadInput(f"expected one of {', '.join(GROUPS)}", field="--ops", value=group)
    grid = QUICK if quick else {"cpu": CPU, "cuda": CUDA}[device]
    epsilon = float(read_config(config).get("rms_norm_eps", 1e-5))
    return Plan(model_from_config(config), device, dtype, grid, tuple(groups or DEFAULT_GROUPS), epsilon)


def use_threads(device: str, threads: int | None) -> None:
    """How many threads PyTorch computes with on a CPU; default 1, whose processor time can be told from the wall's.

    Freed memory is kept there, as the live engine keeps it.
    """
    import torch

    if device == "cpu":
        torch.set_num_threads(threads or 1)
        keep_freed_memory()


def journal_of(output: Path) -> Path:
    """Where the measurements behind a calibration file are kept."""
    return output.with_name(output.name + ".measurements.jsonl")


def open_journal(plan: Plan, output: Path, *, fresh: bool = False) -> Journal:
    """What has been measured already for this plan and this file, whose folder is made if need be."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return Journal(journal_of(output), plan.about(), fresh=fresh)


def calibrate(
    plan: Plan, journal: Journal, output: Path, advance: Callable[[str], None], timer: Measure | None = None
) -> MeasuredCalibration:
    """Measure what is not in the journal yet, and write the file.

    Args:
        advance: told of each measurement that is made.
        timer: in place of the clock.
    """
    measure_all(plan, journal, advance, timer)
    made = assemble(plan, journal, output.stem)
    output.write_text(made.to_yaml(), encoding="utf-8")
    return made
