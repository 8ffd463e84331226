"""The run folder, the progress and the finished points of an A/F ratio sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.executors.executor import Executor
    from twin.sweeps.ratio_sweep import RatioSweep


def run_folder(sweep: RatioSweep, command: str, runs: Path, *, fresh: bool, asked: dict[str, Any]) -> RunDirectory:
    """Open the sweep's run folder; if the block fails, the folder says why, and the run can be resumed."""
    from reports.records.run_directory import open_run
    from twin.api.manifest import bundle_manifest

    content = bundle_manifest(sweep, asked)
    # A run that keeps requests cannot take up one that did not.
    fingerprint = sweep.fingerprint(f"{content['version']} {asked.get('requests', False)}")
    return open_run(runs, command, fingerprint, content, resume=not fresh)


def run_points(
    sweep: RatioSweep,
    run: RunDirectory,
    executor: Executor,
    meanwhile: Callable[[], object],
    *,
    keep_requests: bool = False,
) -> dict[str, Any]:
    """Simulate the missing points, each on disk as soon as it is done; returns the sweep's document."""
    from twin.cli.console import note, progress

    done = run.points()
    if done:
        note(f"taking up {run.path}: {len(done)} of {sweep.size} points are done")

    def while_workers_simulate() -> None:
        sweep.prepare_theory()
        meanwhile()

    with progress("simulating", sweep.size, len(done)) as advance:
        requests_to = run.path / "requests" if keep_requests else None
        for point in sweep.run(done, run.add_point, executor, while_workers_simulate, requests_to):
            advance(f"r = {point['ratio']:g}")
    document = sweep.summarise(done)
    document["run"] = {"id": run.id, "directory": str(run.path)}
    return document
