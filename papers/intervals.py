"""Intervals of means over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev

CONFIDENCE = 0.95


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Student's interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf(0.5 + confidence / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half
