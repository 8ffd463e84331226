"""Requests in the system over time, live and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.serving.records import Columns

Floats = NDArray[np.float64]

POINTS = 200


def timeline(live: Mapping[str, Floats], twin: Columns) -> dict[str, Any]:
    """How many requests had arrived and not been answered, at `time` seconds."""
    arrivals, answered = np.array(twin.arrival), np.array(twin.last_token)
    end = float(max(live["last_token"].max(), answered.max()))
    times = np.linspace(0.0, end, POINTS)
    return {
        "time": times.tolist(),
        "live": _inside(live["arrival"], live["last_token"], times),
        "twin": _inside(arrivals, answered, times),
    }


def _inside(arrivals: Floats, answered: Floats, times: Floats) -> list[int]:
    came = np.searchsorted(np.sort(arrivals), times, side="right")
    went = np.searchsorted(np.sort(answered), times, side="right")
    counts: list[int] = (came - went).tolist()
    return counts
