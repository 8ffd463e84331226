"""Requests in the system over time, measured and predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.serving.records.requests import Columns

Floats = NDArray[np.float64]

POINTS = 200


def timeline(live: Mapping[str, Floats], twin: Columns) -> dict[str, Any]:
    """Number of requests that have arrived and not finished, at each `time` in seconds."""
    arrivals, finished = np.array(twin.arrival), np.array(twin.last_token)
    end = float(max(live["last_token"].max(), finished.max()))
    times = np.linspace(0.0, end, POINTS)
    return {
        "time": times.tolist(),
        "live": _in_system(live["arrival"], live["last_token"], times),
        "twin": _in_system(arrivals, finished, times),
    }


def _in_system(arrivals: Floats, finished: Floats, times: Floats) -> list[int]:
    arrived = np.searchsorted(np.sort(arrivals), times, side="right")
    departed = np.searchsorted(np.sort(finished), times, side="right")
    counts: list[int] = (arrived - departed).tolist()
    return counts
