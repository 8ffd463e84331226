"""The command line: one verb for one question. The commands by name, and the text of `twin --help`.

A command is imported when it runs, and with it the libraries that it needs, so that `twin --help` is quick.
Exit codes: 0 done; 1 a server ended unfinished requests; 2 usage or bad input (one line on stderr); 3 a goal cannot be
met; 4 a threshold was missed; 5 undecided; 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import cache
from textwrap import fill
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from twin import __version__
from workloads.errors import TwinError

if TYPE_CHECKING:
    from cyclopts import App

WIDTH = 80
"""Columns of the help."""

ABOUT = "A digital twin for LLM serving: simulate a serving system, and set theory and published figures beside it."


class Command(NamedTuple):
    """A command: its place (`module:name` of its function), and what it does, in its docstring's first sentences."""

    path: str
    summary: str


COMMANDS = {
    "ablate": Command(
        "twin.cli.runs:ablate",
        "Switch each feature of a serving system on and off, on the same requests: which pay, and which cost.",
    ),
    "adapt": Command(
        "twin.cli.adapt:adapt",
        "Train prefill modules that a frozen decode module serves (SUN), and error compensators of models in few bits"
        " (SPEAR). Needs the extra [live].",
    ),
    "adopt": Command(
        "twin.cli.servers:adopt",
        "Measure a running vLLM or SGLang server, and write a scenario of it and the question of a plan.",
    ),
    "calibrate": Command(
        "twin.cli.calibrate:calibrate",
        "Make a calibration file: by measuring this machine, from a run of an engine, or from specifications.",
    ),
    "init": Command(
        "twin.cli.servers:init",
        "Write a serving scenario with comments, which runs as it is: one model on the fewest GPUs that hold it.",
    ),
    "observe": Command(
        "twin.cli.servers:observe", "Record a live server: its requests through a proxy, or pages of its metrics."
    ),
    "page": Command(
        "twin.cli.page:page",
        "Ask what if in a browser: sliders for rate, lengths, goals, layout and engine, and answers that follow them.",
    ),
    "plan": Command(
        "twin.cli.plan:plan",
        "Find the deployment that meets goals at the least cost: how many GPUs, which parallelism, together or apart.",
    ),
    "replay": Command(
        "twin.cli.servers:replay",
        "Send a recorded workload to a live server at the recorded times, and write when its tokens came.",
    ),
    "report": Command(
        "twin.cli.runs:report", "Draw a run's figures and its self-contained HTML page again, from its summary."
    ),
    "reproduce": Command(
        "twin.cli.reproduce:reproduce", "Compute a paper's tables and figures again, beside the published values."
    ),
    "serve-live": Command("live.server.__main__:serve_live", "Serve a model over HTTP, with OpenAI's endpoints."),
    "simulate": Command(
        "twin.cli.runs:simulate",
        "Simulate a serving system: its latencies, its throughput, and the work of its engines.",
    ),
    "sweep": Command("twin.cli.runs:sweep", "Sweep A/F ratios of an AFD bundle, or any field of a serving scenario."),
    "validate": Command(
        "twin.cli.validate:validate",
        "Run a real model on this machine, predict the same run with the twin, and compare the two.",
    ),
    "watch": Command(
        "twin.cli.servers:watch", "Compare a running engine with its prediction, and raise an alarm when it drifts."
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command, or list them; returns the exit code. A user's error ends in one clear line on stderr."""
    try:
        if list(arguments) in ([], ["--help"], ["-h"]):
            print(overview())
            code = 0
        else:
            from cyclopts import CycloptsError

            try:
                result = program()(
                    list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
                )
            except CycloptsError as error:
                raise TwinError(" ".join(str(error).split()) + " (see twin --help)") from None
            code = result if isinstance(result, int) else 0
        sys.stdout.flush()
        return code
    except TwinError as error:
        line = str(error)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        line = f"{error.filename or 'output'}: {error.strerror or error}"
    except KeyboardInterrupt as error:
        print(f"twin: interrupted; {str(error) or 'nothing was finished that could be kept'}", file=sys.stderr)
        return 130
    print(f"twin: {line}", file=sys.stderr)
    return 2


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def overview() -> str:
    """The text of `twin --help`."""
    listed = {name: command.summary for name, command in COMMANDS.items()}
    listed |= {"--help (-h)": "Display this message, or that of a command.", "--version": "Display the version."}
    indent = " " * (max(map(len, listed)) + 4)
    lines = [
        fill(summary, WIDTH, initial_indent=f"  {name}".ljust(len(indent)), subsequent_indent=indent)
        for name, summary in listed.items()
    ]
    return "\n".join(["Usage: twin COMMAND", "", fill(ABOUT, WIDTH), "", "Commands:", *lines])


@cache
def program() -> App:
    """The program `twin`, which reads the arguments of all commands."""
    import cyclopts

    from twin.process import runs_compiled

    app = cyclopts.App(
        name="twin",
        help=ABOUT,
        version=lambda: f"{__version__} ({'compiled' if runs_compiled() else 'pure Python'})",
        version_flags=["--version"],
        suppress_keyboard_interrupt=False,
        help_format="markdown",
    )
    for name, command in COMMANDS.items():
        app.command(command.path, name=name)
    return app
