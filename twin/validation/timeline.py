"""Requests in the system over time, live and simulated, and the machine's pace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.serving.pace import Pace
from twin.serving.records import Columns

Floats = NDArray[np.float64]

POINTS = 200


def timeline(live: Mapping[str, Floats], twin: Columns, pace: Pace) -> dict[str, Any]:
    """How many requests had arrived and not been answered, and the pace, at `time` seconds."""
    arrivals, answered = np.array(twin.arrival), np.array(twin.last_token)
    end = float(max(live["last_token"].max(), answered.max()))
    times = np.linspace(0.0, end, POINTS)
    return {
        "time": times.tolist(),
        "live": _inside(live["arrival"], live["last_token"], times),
        "twin": _inside(arrivals, answered, times),
        "pace": {rows: [line.at(time) for time in times.tolist()] for rows, line in pace.lines.items()},
    }


def _inside(arrivals: Floats, answered: Floats, times: Floats) -> list[int]:
    came = np.searchsorted(np.sort(arrivals), times, side="right")
    went = np.searchsorted(np.sort(answered), times, side="right")
    counts: list[int] = (came - went).tolist()
    return counts
