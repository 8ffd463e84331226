"""What a machine's pace is told by: small pieces of work that never change, timed again and again.

Both plants and the step times between them speak of readings; what a yardstick is made of only the live plant knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Reading(NamedTuple):
    """What a yardstick took: when it was read, its rows, and seconds (`EngineStepsFile.yardsticks`)."""

    time: float
    rows: int
    seconds: float


def nearest(rows: int, sizes: Iterable[int]) -> int:
    """Of the yardsticks' sizes the one that so many rows go by: it is so many times larger or smaller."""
    return min(sizes, key=lambda size: abs(math.log(size / rows)))
