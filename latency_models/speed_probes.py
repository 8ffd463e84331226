"""Readings of a machine's current speed: fixed pieces of work that are timed again and again.

Simulator and live engine exchange readings only. The work itself is defined in the live engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Reading(NamedTuple):
    """One timing of a speed probe.

    Attributes:
        time: when it was taken, seconds.
        rows: size of the probe, as rows of a step (a key of `EngineRegressionFile.speed_probes`).
        seconds: how long the probe took.
    """

    time: float
    rows: int
    seconds: float


def nearest(rows: int, sizes: Iterable[int]) -> int:
    """The probe size closest to a number of rows, by ratio."""
    return min(sizes, key=lambda size: abs(math.log(size / rows)))
