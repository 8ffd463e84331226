"""The command line: one verb for one question.

Each command lives in a module of its own and imports what it needs when it runs, so that `twin --help` is quick.
Exit codes: 0 done; 1 a server ended unfinished requests; 2 usage or bad input (one line on stderr); 3 a goal cannot be
met; 4 a threshold was missed; 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

import cyclopts

from twin import __version__
from twin.cli.adapt import adapt
from twin.cli.calibrate import calibrate
from twin.cli.report import report
from twin.cli.reproduce import reproduce
from twin.cli.serve_live import serve_live
from twin.cli.simulate import simulate
from twin.cli.sweep import sweep
from twin.cli.validate import validate
from twin.compiled import runs_compiled
from workloads.errors import TwinError


def _version() -> str:
    """The version, and whether hot modules run compiled."""
    return f"{__version__} ({'compiled' if runs_compiled() else 'pure Python'})"


app = cyclopts.App(
    name="twin",
    help="A digital twin for LLM serving: simulate a serving system, and set theory and published figures beside it.",
    version=_version,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    help_format="plaintext",
)
app.command(simulate)
app.command(sweep)
app.command(reproduce)
app.command(calibrate)
app.command(validate)
app.command(adapt)
app.command(serve_live)
app.command(report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code. A user's error ends in one clear line on stderr."""
    try:
        result = app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except cyclopts.CycloptsError as error:
        return _complain(" ".join(str(error).split()) + " (see twin --help)")
    except TwinError as error:
        return _complain(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        return _complain(f"{error.filename or 'output'}: {error.strerror or error}")
    except KeyboardInterrupt as error:
        kept = str(error) or "nothing was finished that could be kept"
        print(f"twin: interrupted; {kept}", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _complain(line: str) -> int:
    print(f"twin: {line}", file=sys.stderr)
    return 2
