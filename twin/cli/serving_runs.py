"""Run folders of serving scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.executors.executor import ExecutorChoice
    from twin.sweeps.serving_sweep import ServingSweep


def serving_run_folder(sweep: ServingSweep, command: str, runs: Path, scenario: Path, *, fresh: bool) -> RunDirectory:
    """A run folder to be opened with `with`; if the block fails, the folder says why, and the run can be resumed."""
    from reports.records.run_directory import open_run
    from twin.api.manifest import serving_manifest

    content = serving_manifest(sweep, scenario)
    return open_run(runs, command, sweep.fingerprint(content["version"]), content, resume=not fresh)


def note_partial_replays(sweep: ServingSweep) -> None:
    """Note on stderr, before anything runs, that `workload.requests` ends a replay before its trace ends."""
    replays = [case.plan.replayed for case in sweep.cases]
    partial = [each for each in replays if each and each["requests"] < each["rows"]]
    if partial:
        from reports.serving.sentences import part_of_trace
        from twin.cli.console import note

        for text in dict.fromkeys(map(part_of_trace, partial)):
            note(text)


def sweep_serving(
    sweep: ServingSweep,
    scenario: Path,
    runs: Path,
    chosen: ExecutorChoice,
    *,
    as_json: bool,
    fresh: bool,
    figures: bool,
) -> int:
    """Sweep a serving scenario: every configuration, with each run on disk as soon as it is done."""
    from reports.settings import in_words, varying
    from twin.api.drawing import illustrate
    from twin.cli.console import note, print_result, progress

    note_partial_replays(sweep)
    with chosen.start() as executor, serving_run_folder(sweep, "sweep", runs, scenario, fresh=fresh) as run:
        done = run.points()
        if done:
            note(f"taking up {run.path}: {len(done)} of {len(sweep.tasks)} runs are done")
        keys = varying([case.settings for case in sweep.cases])
        with progress("simulating", len(sweep.tasks), len(done)) as advance:
            for task in sweep.run(done, run.add_point, executor):
                advance(in_words(sweep.cases[task.case].settings, keys))
        document = sweep.summarise(done)
        document["run"] = {"id": run.id, "directory": str(run.path)}
        run.write_json("summary.json", document)
        if figures:
            illustrate(document, run)
        run.set_status(True, "complete")
    print_result(document, as_json=as_json)
    note(f"run folder: {run.path}")
    return 0
