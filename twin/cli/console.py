"""Output of the commands: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_SECONDS = 30.0
BAR_WIDTH = 24


def note(text: str) -> None:
    """Print a line on stderr, whole: `print` writes the end of a line by itself, and a signal may come before it."""
    sys.stderr.write(f"twin: {text}\n")


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=1, allow_nan=False))


def print_table(table: RenderableType) -> None:
    """Print a table, as wide as it needs to be when stdout is not a terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(table)


@contextlib.contextmanager
def progress(what: str, total: int, done: int, *, patience: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal, a few lines elsewhere. Yields the function that advances it.

    Elsewhere a line follows each tenth of the total and whenever 30 s have passed since the last. There may be more
    steps than `total`.

    Args:
        patience: seconds before anything is shown, for work that is usually done by then.
    """
    if not sys.stderr.isatty():
        yield _Lines(what, total, done, patience).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    # The bar keeps its width; the text gives way.
    text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    columns = (text, BarColumn(bar_width=BAR_WIDTH), MofNCompleteColumn(), TimeRemainingColumn())
    begin = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task(what, total=total, completed=done, visible=patience == 0)

        def advance_bar(text: str) -> None:
            made = bar.tasks[0].completed + 1
            shown = time.monotonic() - begin >= patience
            bar.update(task, completed=made, total=max(made, total), description=f"{what} {text}", visible=shown)

        yield advance_bar


def preparing(configurations: Sized) -> contextlib.AbstractContextManager[Callable[[str], None]]:
    """Show the progress of checking a sweep's configurations, if that takes more than a moment."""
    return progress("preparing", len(configurations), 0, patience=2.0)


class _Lines:
    """Progress as lines on stderr, far enough apart that a log stays readable."""

    def __init__(self, what: str, total: int, done: int, patience: float) -> None:
        self._what, self._total, self._count = what, total, done
        self._said, self._next_time = done, time.monotonic() + (patience or LINE_SECONDS)
        self._patient_until = time.monotonic() + patience

    def advance(self, text: str) -> None:
        """Count one more step."""
        self._count += 1
        now, tenth = time.monotonic(), max(self._total // 10, 1)
        due = self._count // tenth > self._said // tenth or self._count == self._total
        if now >= self._next_time or (due and now >= self._patient_until):
            self._said, self._next_time = self._count, now + LINE_SECONDS
            note(f"{self._what} [{self._count}/{max(self._count, self._total)}] {text}".rstrip())
