"""What the commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from workloads.errors import BadInput

if TYPE_CHECKING:
    from rich.console import RenderableType


def note(text: str) -> None:
    """Say something that is not the result."""
    print(f"twin: {text}", file=sys.stderr)


def print_json(document: object) -> None:
    """Exactly one JSON document on stdout."""
    print(json.dumps(document, indent=1, allow_nan=False))


def print_table(table: RenderableType) -> None:
    """A table as wide as it needs to be when stdout is not a terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(table)


@contextlib.contextmanager
def progress(what: str, total: int, done: int, every: int = 1) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal, a line every so many steps elsewhere; the caller is handed the function that
    advances it. There may be more steps than `total`.
    """
    if not sys.stderr.isatty():
        count = done

        def advance_line(text: str) -> None:
            nonlocal count
            count += 1
            if count % every == 0 or count == total:
                note(f"{what} [{count}/{max(count, total)}] {text}")

        yield advance_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done)

        def advance_bar(text: str) -> None:
            made = bar.tasks[0].completed + 1
            bar.update(task, completed=made, total=max(made, total), description=f"{what} {text}")

        yield advance_bar


def require_at_least(flag: str, value: int | None, least: int) -> None:
    """Refuse a flag's value below `least`."""
    if value is not None and value < least:
        raise BadInput(f"expected a whole number from {least} up", field=flag, value=value)
