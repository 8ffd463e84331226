"""`python -m live.server`: the server without the rest of the command line."""

from __future__ import annotations

import sys

import cyclopts

from live.server.command import serve_live
from workloads.errors import TwinError


def main() -> int:
    """Run the server. Exit codes: 0 all requests were answered, 1 some were cut off, 2 bad input (one line on
    stderr).
    """
    app = cyclopts.App(name="python -m live.server", help_format="plaintext", version_flags=[])
    app.default(serve_live)
    try:
        result = app(exit_on_error=False, print_error=False, result_action="return_value")
    except (cyclopts.CycloptsError, TwinError) as error:
        print(f"live.server: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
