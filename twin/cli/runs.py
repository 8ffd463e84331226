"""Simulations and sweeps in run folders: open or resume one, simulate with progress, draw again (`twin report`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin import __version__
from workloads.errors import BadInput

if TYPE_CHECKING:
    from reports.records.run_directory import RunDirectory
    from twin.executors.executor import Executor
    from twin.serving.plan.plan import ServingPlan
    from twin.sweeps.serving_sweep import Sweep


def open_sweep(
    sweep: Sweep[Any, Any], command: str, runs: Path, inputs: dict[str, Any], *, fresh: bool
) -> RunDirectory:
    """The run folder of a sweep, to be opened with `with`: an unfinished one is resumed unless `fresh`.

    Args:
        inputs: keys of the manifest in front of the sweep's own.
    """
    return open_folder(command, runs, {**inputs, **sweep.inputs()}, sweep.fingerprint, fresh=fresh)


def open_folder(
    command: str, runs: Path, inputs: dict[str, Any], fingerprint: Callable[[str], str], *, fresh: bool
) -> RunDirectory:
    """A run folder, to be opened with `with`: an unfinished one of the same fingerprint is resumed unless `fresh`.

    Args:
        inputs: entries of the manifest. fingerprint: of the inputs and the version that it is called with.
    """
    from reports.records.run_directory import open_run
    from twin.api.run_folder import manifest

    return open_run(runs, command, fingerprint(__version__), manifest(inputs), resume=not fresh)


def simulate_missing(
    sweep: Sweep[Any, Any], run: RunDirectory, executor: Executor, meanwhile: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Simulate what the folder lacks, each run on disk as soon as it is done; returns the documents of all, by key.

    Args:
        meanwhile: called once the workers are busy.
    """
    from twin.cli.console import progress

    points = run.points()
    total = len(sweep.tasks)
    if points:
        note_resumed(run.path, len(points), total)
    with progress("simulating", total, len(points)) as advance:
        for task in sweep.run(points, run.add_point, executor, meanwhile, run.path):
            advance(sweep.label(task))
    return points


def note_resumed(folder: Path, count: int, total: int) -> None:
    """Note on stderr that a folder has finished runs."""
    from twin.cli.console import note

    note(f"taking up {folder}: {count} of {total} runs are done")


def note_partial_replay(*plans: ServingPlan) -> None:
    """Note on stderr, before anything runs, that `workload.requests` ends a replay before its trace ends."""
    partial = [plan.replayed for plan in plans if plan.replayed and plan.replayed["requests"] < plan.replayed["rows"]]
    if partial:
        from reports.serving.sentences import part_of_trace
        from twin.cli.console import note

        for text in dict.fromkeys(map(part_of_trace, partial)):
            note(text)


def load_figures() -> None:
    """Import the drawing library, which takes a second, while the workers simulate."""
    import reports.svg  # noqa: F401


def report(run: Path, /) -> int:
    """Draw a run's figures and its self-contained HTML page again, from its summary.

    It takes any run: a sweep or simulation of a serving system or an AFD bundle, or a reproduced paper.

    Args:
        run: Run folder, for example runs/20260101T120000-sweep-0123456789.
    """
    from reports.records.run_directory import write_text
    from twin.api.run_folder import draw

    manifest, summary = _read(run)
    try:
        figures, page = draw(summary, manifest)
    except BadInput as error:
        raise BadInput(error.expected, field=error.field, value=error.value, file=run / "summary.json") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        lacking = f"the field {error}" if isinstance(error, KeyError) else f"other values ({error})"
        expected = f"expected a whole document of schema {summary['schema']}, with {lacking}"
        raise BadInput(expected, file=run / "summary.json") from None
    for name, svg in figures.items():
        write_text(run / "figures" / f"{name}.svg", svg)
    print(write_text(run / "report.html", page))
    return 0


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from reports.records.run_directory import read_run

    try:
        manifest, summary = read_run(run)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"expected a run folder: {reason}", file=run) from None
    if summary is None:
        status, command = manifest.get("status", "unknown"), manifest.get("command", "not said")
        raise BadInput(f"expected a finished run, this one is not ({status}); the command was: {command}", file=run)
    return manifest, summary
