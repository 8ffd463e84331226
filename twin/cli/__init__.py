"""The command line: one verb for one question.

Each command lives in a module of its own (`commands.py` lists them) and imports what it needs when it runs. The list
needs none of the libraries that commands need, so that `twin --help` is quick.
Exit codes: 0 done; 1 a server ended unfinished requests; 2 usage or bad input (one line on stderr); 3 a goal cannot be
met; 4 a threshold was missed; 5 undecided; 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from twin.cli.commands import overview, run_command
from workloads.errors import TwinError


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
            code = run_command(arguments)
        sys.stdout.flush()
        return code
    except TwinError as error:
        return _complain(str(error))
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        return _complain(f"{error.filename or 'output'}: {error.strerror or error}")
    except KeyboardInterrupt as error:
        reason = str(error) or "nothing was finished that could be kept"
        print(f"twin: interrupted; {reason}", file=sys.stderr)
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _complain(line: str) -> int:
    print(f"twin: {line}", file=sys.stderr)
    return 2
