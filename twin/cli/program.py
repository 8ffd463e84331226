"""The program `twin`: its arguments are read, and one command is imported and run."""

from __future__ import annotations

from collections.abc import Sequence

import cyclopts

from twin import __version__
from twin.cli.commands import ABOUT, COMMANDS
from twin.process import runs_compiled
from workloads.errors import TwinError


def _version() -> str:
    """The version, and whether hot modules run compiled."""
    return f"{__version__} ({'compiled' if runs_compiled() else 'pure Python'})"


app = cyclopts.App(
    name="twin",
    help=ABOUT,
    version=_version,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    help_format="markdown",
)
for _name, _command in COMMANDS.items():
    app.command(_command.path, name=_name)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    try:
        result = app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
    except cyclopts.CycloptsError as error:
        raise TwinError(" ".join(str(error).split()) + " (see twin --help)") from None
    return result if isinstance(result, int) else 0
