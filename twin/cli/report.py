"""`twin report`."""

from __future__ import annotations

from pathlib import Path


def report(run: Path, /) -> int:
    """Draw a run's figures and its self-contained HTML page again, from its summary.

    Parameters
    ----------
    run
        Run folder, for example runs/20260101T120000-sweep-0123456789.
    """
    from reports.afd.figures import sweep_figures
    from reports.afd.page import sweep_page
    from reports.records.run_directory import read_run, write_text
    from workloads.errors import BadInput

    try:
        manifest, summary = read_run(run)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"expected a run folder: {reason}", file=run) from None
    if summary is None:
        status = manifest.get("status", "unknown")
        raise BadInput(
            f"expected a finished run, this one is not ({status}); the command was: {manifest['command']}", file=run
        )
    document = summary.get("sweep", summary)
    drawn = sweep_figures(document)
    for name, svg in drawn.items():
        write_text(run / "figures" / f"{name}.svg", svg)
    print(write_text(run / "report.html", sweep_page(document, manifest, drawn)))
    return 0
