"""Variation between groups of measurements, apart from the scatter within them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from latency_models.fitting.estimator import Floats


def deviation_between(groups: Sequence[Floats]) -> float:
    """Standard deviation of what the members of a group have in common: a_i in x_ij = μ + a_i + ε_ij.

    By the method of moments: the variance of the groups' means, less the part that the scatter within groups explains.
    Groups may be of different sizes. 0 if the scatter explains all of it, and for fewer than two groups.

    Args:
        groups: each of shape (n_i,); groups of one member are left out.
    """
    several = [group for group in groups if len(group) > 1]
    if len(several) < 2:
        return 0.0
    means = np.array([group.mean() for group in several])
    explained = np.mean([group.var(ddof=1) / len(group) for group in several])
    return float(np.sqrt(max(means.var(ddof=1) - explained, 0.0)))
