"""`twin calibrate run` without its command line: plan, measure, write the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from latency_models.deployment.hugging_face import model_from_config, read_config
from latency_models.io.config_io import write_yaml
from latency_models.sources.calibration_file import MeasuredCalibration
from live.calibration.assembling import assemble, pictures
from live.calibration.communication import measure_link
from live.calibration.grid import COARSE, CPU, CUDA, GROUPS, QUICK
from live.calibration.journal import Journal
from live.calibration.measuring import DTYPES, Measure, Plan, count, measure_all
from live.device import DEFAULT_DTYPE, device_name, keep_freed_memory, use_huge_pages
from live.device import use_threads as set_threads
from reports.run_directory import write_text
from workloads.errors import BadInput

__all__ = ["calibrate", "count", "link_of", "make_plan", "open_journal", "pictures", "use_threads"]

DEFAULT_GROUPS = tuple(group for group in GROUPS if group != "communication")


def make_plan(
    config: Path,
    device: str,
    dtype: str | None = None,
    groups: Sequence[str] | None = None,
    *,
    coarse: bool = False,
    quick: bool = False,
) -> Plan:
    """The plan of a calibration: the points to measure, and the device."""
    if device not in DEFAULT_DTYPE:
        raise BadInput("expected cpu or cuda", field="--device", value=device)
    device_name(device)
    dtype = dtype or DEFAULT_DTYPE[device]
    if dtype not in DTYPES:
        raise BadInput(f"expected one of {', '.join(DTYPES)}", field="--dtype", value=dtype)
    for group in groups or ():
        if group not in GROUPS:
            raise BadInput(f"expected one of {', '.join(GROUPS)}", field="--ops", value=group)
    grid = QUICK if quick else COARSE if coarse else {"cpu": CPU, "cuda": CUDA}[device]
    epsilon = read_config(config).number("rms_norm_eps", 1e-6)
    return Plan(model_from_config(config), device, dtype, grid, tuple(groups or DEFAULT_GROUPS), epsilon)


def use_threads(device: str, threads: int | None) -> None:
    """Set the CPU threads that PyTorch uses (default 1: its processor time excludes other programs)."""
    if device == "cpu":
        set_threads(1 if threads is None else threads, "--threads")
        keep_freed_memory()
        use_huge_pages()


def journal_of(output: Path) -> Path:
    return output.with_name(output.name + ".measurements.jsonl")


def open_journal(plan: Plan, output: Path, *, fresh: bool = False) -> Journal:
    """The measurements that exist for this plan and this file. The file's folder is made if needed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    return Journal(journal_of(output), plan.about(), fresh=fresh)


def link_of(output: Path) -> Path:
    return output.with_name(f"{output.stem}.link.yaml")


def calibrate(
    plan: Plan, journal: Journal, output: Path, advance: Callable[[str], None], timer: Measure | None = None
) -> MeasuredCalibration:
    """Measure what the journal does not have, and write the file. With communication on a CPU, also the link file."""
    measure_all(plan, journal, advance, timer)
    if "communication" in plan.groups and plan.device == "cpu":
        link = measure_link(journal, plan.grid.rounds, quick=plan.grid is QUICK, advance=advance)
        write_text(link_of(output), write_yaml(link.model_dump(mode="json", by_alias=True)))
    calibration = assemble(plan, journal, output.stem)
    write_text(output, calibration.to_yaml())
    return calibration
