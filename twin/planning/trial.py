"""A trial: the evaluation of a candidate by simulated windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scenarios.fields import Goal
from twin.planning.confidence import Floats, probability
from twin.planning.question import Document
from twin.planning.space import Candidate
from twin.serving.results.uncertainty import combine


@dataclass(frozen=True)
class Horizon:
    """The lengths of windows.

    Attributes:
        short, long: requests of a window. warmup: seconds at its beginning that do not count.
        span: seconds for which goals are to be met.
    """

    short: int
    long: int
    warmup: float
    span: float


@dataclass(frozen=True)
class Trial:
    """The evaluation of a candidate by simulated windows.

    Attributes:
        probability: that a span meets all goals at the best estimate of the step times; 0 for a saturated system.
        windows: long ones, or a single short one.
        decided: further windows would not change it. meets: all goals, as far as is known.
        reason: why not; empty for a candidate that meets its goals.
        shifts: of the mean excesses, by each draw of the step times that was simulated, shape (draws, goals).
        draws: their number. sure: share of all draws under which goals hold; those that were not simulated count too.
        seed: of the windows that confirm a candidate; None: the question's.
    """

    candidate: Candidate
    probability: float = 0.0
    windows: Sequence[Document] = ()
    decided: bool = True
    meets: bool = False
    reason: str = ""
    saturated: bool = False
    shifts: Sequence[Sequence[float]] = ()
    draws: int = 0
    sure: float | None = None
    seed: int | None = None

    @property
    def failed(self) -> bool:
        """True for a candidate that misses its goals for certain."""
        return self.decided and not self.meets

    @cached_property
    def _combined(self) -> tuple[Document, Document]:
        return combine([window["summary"] for window in self.windows]) if self.windows else ({}, {})

    @property
    def summary(self) -> Document:
        """Metrics, as of a simulation with a replication for each window."""
        return self._combined[0]

    @property
    def intervals(self) -> Document:
        """Their confidence intervals."""
        return self._combined[1]

    @property
    def excess(self) -> Floats:
        """The excess of each goal in each window, shape (windows, goals)."""
        return np.array([window["excess"] for window in self.windows])

    def long_run_probability(self) -> float:
        """The probability that goals are met in the long run, over windows and draws; 0 for a saturated system."""
        if self.saturated or not self.windows:
            return 0.0
        return probability(self.excess, math.inf, np.array(self.shifts) if self.draws else None)

    def value(self, goal: int) -> float | None:
        """The mean over windows of a goal's metric; None where no request counts."""
        values = [window["values"][goal] for window in self.windows]
        return None if None in values else float(np.mean(values))

    def worst(self, goals: Sequence[Goal]) -> tuple[float, Goal]:
        """The largest ratio of a metric to its limit, and its goal."""
        ratios = [
            (math.inf if (value := self.value(i)) is None else goal.ratio(value), goal) for i, goal in enumerate(goals)
        ]
        return max(ratios, key=lambda pair: pair[0])


def in_unit(goal: Goal, value: float) -> str:
    """A goal's value with its unit."""
    if goal.at_most:
        return f"{1e3 * value:.4g} ms" if value < 1 else f"{value:.4g} s"
    return f"{100 * value:.4g} %" if goal.metric == "goodput" else f"{value:.4g}/s"
