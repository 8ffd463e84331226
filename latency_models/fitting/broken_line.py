"""Broken lines: continuous, linear from knot to knot, with knots where the data are."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from latency_models.fitting.estimator import Floats
from latency_models.io.config_io import Strict
from workloads.errors import BadInput


class BrokenLine(Strict):
    """A line f with f(0) = 0, linear from knot to knot, seconds; beyond the last without falling."""

    knots: list[PositiveInt]
    values: list[NonNegativeFloat]

    @model_validator(mode="after")
    def _agrees(self) -> BrokenLine:
        if any(after <= before for before, after in itertools.pairwise(self.knots)):
            raise BadInput("expected rising numbers", field="knots", value=self.knots)
        if len(self.values) != len(self.knots):
            raise BadInput(f"expected a value for each of {len(self.knots)} knots", field="values", value=self.values)
        return self

    def at(self, x: float) -> float:
        """The value f(x)."""
        knots, values = self.knots, self.values
        if not knots:
            return 0.0
        i = min(bisect_left(knots, x), len(knots) - 1)
        before_x, before_y = (knots[i - 1], values[i - 1]) if i else (0, 0.0)
        slope = (values[i] - before_y) / (knots[i] - before_x)
        if x > knots[i]:
            return values[i] + max(slope, 0.0) * (x - knots[i])
        return before_y + slope * (x - before_x)

    def scaled(self, factor: float, beyond: float = 1.0) -> BrokenLine:
        """The line times a factor; its slope beyond the last knot, up to 1000 times as far, times `beyond` as well."""
        if not self.knots:
            return self
        far = 1000 * self.knots[-1]
        end = self.values[-1] + beyond * (self.at(far) - self.values[-1])
        return BrokenLine(knots=[*self.knots, far], values=[factor * value for value in (*self.values, end)])


def choose_knots(column: Floats, support: int, dense: int) -> list[int]:
    """Sizes at which a broken line may bend: every number up to `dense`, then 1, 2, 3, 4, 6, 8, 12, …

    The last knot is the largest size, (n,). Each piece of the line has at least `support` points.
    """
    above = np.sort(column[column > 0])
    if not len(above):
        return []
    largest, covered = int(above[-1]), 0
    octaves = (1 << i for i in range(largest.bit_length()))
    knots: list[int] = []
    for knot in sorted({*range(1, dense + 1), *(size for octave in octaves for size in (octave, octave * 3 // 2))}):
        below = int(np.searchsorted(above, knot, side="right"))
        if knot < largest and below - covered >= support:
            knots.append(knot)
            covered = below
    if knots and len(above) - covered < support:
        knots.pop()
    return [*knots, largest]


def basis(column: Floats, knots: Sequence[int], dense: int) -> list[Floats]:
    """Basis functions of a broken line at some sizes, one column of shape (n,) for each knot.

    Up to `dense` they are levels: 1 at the knot, falling to 0 at the next on either side; the last stays 1 beyond. From
    there on they are rises: how far along its piece a size lies, 0 to 1, and beyond the last knot further.
    """
    levels = [knot for knot in knots if knot <= dense]
    columns: list[Floats] = [np.interp(column, [0, *levels], unit) for unit in np.eye(len(levels) + 1)[1:]]
    for before, knot in itertools.pairwise([*(levels[-1:] or [0]), *knots[len(levels) :]]):
        share = (column - before) / (knot - before)
        columns.append(np.maximum(share, 0.0) if knot == knots[-1] else np.clip(share, 0.0, 1.0))
    return columns


def from_basis(knots: list[int], amounts: Sequence[float], dense: int) -> BrokenLine:
    """The broken line with these amounts of its basis functions."""
    columns = basis(np.array(knots, float), knots, dense)
    values = sum((amount * column for amount, column in zip(amounts, columns, strict=True)), np.zeros(len(knots)))
    return BrokenLine(knots=knots, values=values.tolist())
