"""A measured run, read and compared with a prediction of it. Nothing is fitted to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import spread
from twin.serving.results.timeseries import POINTS, curve
from twin.serving.results.uncertainty import flatten
from workloads.errors import BadInput, readable
from workloads.json_files import number_lines

Floats = NDArray[np.float64]
FIELDS = ("queued_ts", "first_token_ts", "last_token_ts", "output_toks")


def read_reference_run(requests: Path, timeseries: Path | None = None) -> dict[str, Any]:
    """Read a measured run and compute its metrics.

    `requests` has a JSON object a line with `queued_ts`, `first_token_ts` and `last_token_ts` in seconds of one clock,
    and `output_toks`. `timeseries` is a CSV with the columns t, running and waiting. TTFT and E2E count from
    `queued_ts`.

    Raises:
        BadInput: the file or one of its lines cannot be used; it names both.
    """
    queued, first, last, tokens = _read(requests)
    several = tokens > 1
    latencies = {"ttft": first - queued, "tpot": (last - first)[several] / (tokens[several] - 1), "e2e": last - queued}
    seconds = float(last.max() - queued.min())
    document: dict[str, Any] = {
        "source": requests.parent.name + "/" + requests.name,
        "requests": len(queued),
        "summary": {name: spread(values) for name, values in latencies.items()}
        | {"output_throughput": float(tokens.sum()) / seconds},
        "quantiles": {"p": np.linspace(0, 1, POINTS).tolist()}
        | {name: curve(values) for name, values in latencies.items()},
    }
    return document | (_timeseries(timeseries) if timeseries else {})


def compare(predicted: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The measured and the predicted value, and the relative error, of each metric that both have."""
    values = flatten(predicted)
    return {
        name: {"measured": value, "predicted": values[name], "error": values[name] / value - 1}  # type: ignore[operator]
        for name, value in flatten(measured).items()
        if value and values.get(name) is not None
    }


def _read(file: Path) -> tuple[Floats, Floats, Floats, Floats]:
    with readable(file):
        text = file.read_text(encoding="utf-8")
    table = np.array([row for _, row in number_lines(file, text, FIELDS)])
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _timeseries(file: Path) -> dict[str, list[float]]:
    import csv

    try:
        with file.open(encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        return {
            "time": [float(row["t"]) for row in rows],
            "running": [float(row["running"]) for row in rows],
            "waiting": [float(row["waiting"]) for row in rows],
        }
    except OSError as error:
        raise BadInput(f"expected a readable file: {error.strerror}", file=file) from None
    except (ValueError, KeyError, TypeError):
        raise BadInput("expected a CSV with the numeric columns t, running and waiting", file=file) from None
