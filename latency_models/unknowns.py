"""Named unknowns of a step-time model, and draws of them: the error that the model expects of itself.

A model names its unknowns. Each of them has a score, a standard normal number of which 0 stands for the estimate; the
model says what a score does to its step times. Unknowns of one name are one unknown: two pools of one GPU that both
have an `overhead` get the same score.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Basis: TypeAlias = Literal["fitted", "held out", "stated", "assumed", "extrapolated"]
"""The origin of a deviation: the covariance of a fit, errors at points that were left out, the user, a prior for what
was not measured, a prior for batches beyond the measurements."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """One thing that a step-time model does not know exactly.

    `name`: short, with a part after a dot (`fit.2`). `about`: a phrase for tables. `basis`: where the deviation comes
    from. `deviation`: of the factor's logarithm at a score of 1; None for no factor. `measure`: in order to know more.
    """

    name: str
    about: str
    basis: Basis
    deviation: float | None = None
    measure: str = ""

    @property
    def group(self) -> str:
        """The name before the dot: parts of one group are judged together."""
        return self.name.partition(".")[0]

    def factor(self, score: float) -> float:
        """The factor of a score: exp(deviation · score), so that 2 and 1/2 are equally far from 1."""
        assert self.deviation is not None
        return math.exp(self.deviation * score)


def draw_scores(unknowns: Iterable[Unknown], rng: np.random.Generator) -> dict[str, float]:
    """A score for each unknown, by name. It depends on the generator's state and the name, not on other unknowns."""
    from numpy.random import default_rng  # slow to import, and only draws need it

    key = int(rng.integers(2**63))
    return {
        unknown.name: float(default_rng([key, zlib.crc32(unknown.name.encode())]).standard_normal())
        for unknown in unknowns
    }
