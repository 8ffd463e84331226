"""`twin report`: draws a run's figures and page again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workloads.errors import BadInput


def report(run: Path, /) -> int:
    """Draw a run's figures and its self-contained HTML page again, from its summary.

    It takes any run: a sweep or simulation of a serving system or an AFD bundle, or a reproduced paper.

    Args:
        run: Run folder, for example runs/20260101T120000-sweep-0123456789.
    """
    from reports.records.run_directory import write_text
    from twin.api.drawing import draw

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
