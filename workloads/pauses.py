"""Pauses of clients: think times of users, and the time that a tool call takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workloads.checks import number
from workloads.errors import BadInput

SMALLEST_CV = 1e-3
"""Smallest coefficient of variation of gamma-distributed times, as in `workloads.arrivals.Gamma`."""

LONGEST = 1e9
"""Longest mean of a pause, seconds."""


@dataclass(frozen=True)
class Pauses:
    """Gamma-distributed pauses of the given mean, seconds, and coefficient of variation; with cv 0 all are alike.

    Raises `BadInput` unless 0 <= mean <= 1e9, and cv is 0 or 0.001 <= cv <= 100.
    """

    mean: float
    cv: float = 0.0

    def __post_init__(self) -> None:
        number(self.mean, "mean", low=0, high=LONGEST, hint=" seconds")
        number(self.cv, "cv", low=0, high=100)
        if 0 < self.cv < SMALLEST_CV:
            raise BadInput(f"expected 0, or at least {SMALLEST_CV}", field="cv", value=self.cv)

    @property
    def is_constant(self) -> bool:
        """True if there is only one pause to draw."""
        return not (self.mean and self.cv)

    def stream(self, rng: np.random.Generator) -> Callable[[], float]:
        """A function that draws the next pause, seconds; from now on `rng` is its own."""
        if self.is_constant:
            return lambda: self.mean
        shape = self.cv**-2
        return lambda: float(rng.gamma(shape, self.mean / shape))
