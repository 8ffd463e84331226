"""What several commands have: options, whose fields are flags and docstrings their help, and output.

Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from reports.run_directory import naming

FLAG = Parameter(negative=())

Flag = Annotated[bool, FLAG]
Json = Annotated[bool, Parameter(negative=(), help="Print one JSON document on stdout and nothing else there.")]
Fresh = Annotated[bool, Parameter(negative=(), help="Start anew even if an unfinished run of the same inputs exists.")]
Settings = Annotated[list[str] | None, Parameter(name="--set", negative=())]
Output = Annotated[Path, Parameter(name=["--output", "-o"])]
FileOrStdout = Annotated[Path | None, Parameter(name=["--output", "-o"], help="File to write; default: print it.")]


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """The run folder and what is printed."""

    json: Json = False

    runs: Path = Path("runs")
    """Parent of the run folders."""

    no_figures: Flag = False
    """Leave out figures and the HTML report."""


@Parameter(name="*")
@dataclass(frozen=True)
class ExecutorOptions:
    """Processes or cluster of the runs."""

    jobs: int | None = None
    """Processes; default: one for each core."""

    executor: str = "local"
    """Place of the runs: local, dask (workers of its own), dask://host:port (a running scheduler) or ray."""


@Parameter(name="*")
@dataclass(frozen=True)
class RepetitionOptions:
    """Runs of each configuration of a serving system."""

    replications: int = 1
    """Runs with other seeds of the same workload; several give every metric a 95 % interval (serving systems)."""

    draws: int | None = None
    """Runs with what is not known of step times and memory drawn, 10 or more; default: as many as replications if
several (serving systems)."""


if TYPE_CHECKING:
    from reports.blocks import Report

    Show = Callable[[dict[str, Any]], Report]
    """Makes the report of a document."""

LINE_SECONDS = 30.0

MAX_LEFT_RATIO = 50.0
"""A bound of the time left, over the time until now, beyond which it says nothing."""

BAR_WIDTH = 24


def note(text: str) -> None:
    """Print a line on stderr, whole: `print` writes the end of a line by itself, and a signal may come before it."""
    sys.stderr.write(f"twin: {text}\n")


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=1, allow_nan=False))


def print_result(document: dict[str, Any], show: Show, *, as_json: bool) -> None:
    """Print a result on stdout: its document, or its report."""
    if as_json:
        print_json(document)
    else:
        print_table(show(document))


def print_table(report: Report) -> None:
    """Print a report, as wide as it needs to be when stdout is not a terminal."""
    from rich.console import Console

    from reports.terminal import printed

    Console(width=None if sys.stdout.isatty() else 200).print(printed(report))


def print_run(document: dict[str, Any], show: Show | None = None, *, as_json: bool) -> None:
    """Print the result of a run on stdout, and its folder on stderr. `show`: default by the document's schema."""
    from twin.api.run_folder import report

    if as_json:
        print_json(document)
    else:
        print_table((show or report)(document))
    note(f"run folder: {document['run']['directory']}")


def write_or_print(text: str, output: Path | None) -> None:
    """Write a file or print its text on stdout if none is named."""
    if output is None:
        print(text, end="")
        return
    with naming(output):
        output.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def progress(
    label: str, total: int | None, completed: int, *, patience: float = 0.0, remaining: Callable[[], int] | None = None
) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal, a few lines elsewhere. Yields the function that advances it.

    Elsewhere a line follows each tenth of the total and whenever 30 s have passed since the last.

    Args:
        total: None where it is not known before.
        patience: seconds before anything is shown, for work that is usually done by then.
        remaining: a bound of the steps to come, for a total that is not known before.
    """
    if not sys.stderr.isatty():
        yield _lines(label, total, completed, patience, remaining)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    # The bar keeps its width; the text gives way.
    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    timed = TimeElapsedColumn() if total is None and remaining is None else TimeRemainingColumn()
    columns = (text, BarColumn(bar_width=BAR_WIDTH), MofNCompleteColumn(), timed)
    begin = time.monotonic()
    label = label if remaining is None else f"{label}, at most"
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(label, total=total, completed=completed, visible=patience == 0)

        def advance_bar(text: str) -> None:
            count = bar.tasks[0].completed + 1
            visible = time.monotonic() - begin >= patience
            bound = count + remaining() if remaining else total and max(count, total)
            bar.update(task, completed=count, total=bound, description=f"{label} {text}", visible=visible)

        yield advance_bar


def _lines(
    label: str, total: int | None, completed: int, patience: float, remaining: Callable[[], int] | None
) -> Callable[[str], None]:
    """Progress as lines on stderr, far enough apart that a log stays readable."""
    begin, count, noted = time.monotonic(), completed, completed
    next_time = begin + (patience or LINE_SECONDS)

    def advance(text: str) -> None:
        nonlocal count, noted, next_time
        count += 1
        now = time.monotonic()
        tenth = max((total or 0) // 10, 1)
        due = total is not None and (count // tenth > noted // tenth or count == total)
        if now >= next_time or (due and now >= begin + patience):
            noted = count
            next_time = now + LINE_SECONDS
            note(f"{label} {state(now - begin)} {text}".rstrip())

    def state(seconds: float) -> str:
        """The count, its total or a bound of it, and the time left at the speed until now."""
        if total is None and remaining is None:
            return f"[{count}, {_duration(seconds)}]"
        end = count + remaining() if remaining else max(total or 0, count)
        seconds_left = (end - count) * seconds / (count - completed)
        bound = "at most " if remaining else ""
        counts = f"{count} of {bound}{end}" if remaining else f"{count}/{end}"
        useful = seconds_left and (not remaining or seconds_left < MAX_LEFT_RATIO * seconds)
        return f"[{counts}, {bound}{_duration(seconds_left)} left]" if useful else f"[{counts}]"

    return advance


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
