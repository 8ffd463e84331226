"""Step times of a whole engine as it stands, learnt from steps that were timed on it.

    t = β + δ·decodes + κ·chunks + ω·outputs
          + f₁(rows) + f₂(decodes · longest) + f₃(Σ over chunks of tokens · (context + tokens))

Each f is a broken line through 0 with knots where the data are, so that a knee (a cache that no longer holds, a product
that changes its algorithm) is followed and not averaged away. They rise or stay level: more work takes no less time.
Not so f₁ where rows are few: a CPU has several ways to compute a product of one row, of two or three, and of strips of
four, so that 3 rows may take longer than 4, and 7 than 8. There each number of rows has a level of its own. `longest`
is there because decodes of unequal lengths are padded to the longest where attention runs as one dense product; its
length is counted in whole pages.

Where kernel tables say what a step should take, this says what it does take, host included; it holds for the engine,
the model and the machine that were measured.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from latency_models.base import CannotFit, Estimator, Floats
from latency_models.calibration import Provenance
from latency_models.strict import Strict, checked, read_yaml
from schedulers.batches import Batch
from workloads.errors import BadInput

SCHEMA = "twin.engine-steps/2"

LINES = ("rows", "decode_attention", "chunk_attention")
SLOPES = ("decodes", "chunks", "outputs")

FEW = 32
"""Rows up to which each number of them has a level of its own, where it was timed often enough."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a step's duration depends on, and the duration itself, seconds.

    Attributes:
        rows: prompt tokens and decodes. decode_attention: decodes × tokens of the longest, in whole pages.
        chunk_attention: Σ tokens · (context + tokens) of prompt chunks. decodes, chunks: how many.
        outputs: rows of the LM head.
    """

    rows: int
    decode_attention: int
    chunk_attention: int
    decodes: int
    chunks: int
    outputs: int
    seconds: float = 0.0


def describe(batch: Batch, page_tokens: int, seconds: float = 0.0) -> Step:
    """A batch as this model sees it."""
    seen = 0
    for chunk in batch.chunks:
        seen += chunk.tokens * (chunk.context + chunk.tokens)
    return Step(
        rows=batch.n_decodes + batch.prefill_tokens,
        decode_attention=batch.n_decodes * pages(batch.longest_decode, page_tokens),
        chunk_attention=seen,
        decodes=batch.n_decodes,
        chunks=len(batch.chunks),
        outputs=batch.outputs,
        seconds=seconds,
    )


def pages(tokens: int, page_tokens: int) -> int:
    """Tokens in whole pages."""
    return -(-tokens // page_tokens) * page_tokens


class BrokenLine(Strict):
    """f(0) = 0, then linear from knot to knot; beyond the last, on with the last slope unless that falls. Seconds."""

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
        """f(x)."""
        knots, values = self.knots, self.values
        if not knots:
            return 0.0
        i = min(bisect_left(knots, x), len(knots) - 1)
        before_x, before_y = (knots[i - 1], values[i - 1]) if i else (0, 0.0)
        slope = (values[i] - before_y) / (knots[i] - before_x)
        if x > knots[i]:
            return values[i] + max(slope, 0.0) * (x - knots[i])
        return before_y + slope * (x - before_x)


class EngineStepsFile(Strict):
    """The file `twin.engine-steps/2`. Times in seconds.

    Attributes:
        page_tokens: tokens of a KV block. overhead, slopes, lines: β, δ κ ω and the broken lines, by name.
        largest: of each feature, the largest that was measured. points: steps that taught it.
        heldout_median_error, heldout_p90_error: |predicted / measured − 1| of steps that taught nothing.
        repeat_spread: relative deviation of steps that are alike: what no model could explain.
        yardsticks: seconds that the machine's yardsticks take at the pace that the rest is for, by their rows; none
            where the pace was not read.
    """

    schema_: Literal["twin.engine-steps/2"] = Field(alias="schema")
    page_tokens: PositiveInt
    overhead: NonNegativeFloat
    slopes: dict[str, NonNegativeFloat]
    lines: dict[str, BrokenLine]
    largest: dict[str, int]
    points: PositiveInt
    heldout_median_error: NonNegativeFloat
    heldout_p90_error: NonNegativeFloat
    repeat_spread: NonNegativeFloat
    yardsticks: dict[PositiveInt, PositiveFloat] = Field(default_factory=dict)
    provenance: Provenance


class EngineSteps(Estimator):
    """The regression above; least squares of relative errors, with no coefficient below 0.

    `fit` learns:
        overhead_, slopes_, lines_: β, δ κ ω by name, and the broken lines by name.
        largest_: the largest of every feature that was measured. points_: how many steps.

    Args:
        page_tokens: tokens of a KV block.
        support: steps that a piece of a broken line is learnt from, at least.
        huber: steps further than this many deviations off count by their distance, no longer by its square.
    """

    overhead_: float
    slopes_: dict[str, float]
    lines_: dict[str, BrokenLine]

    def __init__(self, page_tokens: int = 16, *, support: int = 20, huber: float = 1.5) -> None:
        self.page_tokens, self.support, self.huber = page_tokens, support, huber

    def fit(self, steps: Sequence[Step]) -> Self:
        """Learn from timed steps.

        Raises:
            CannotFit: fewer than 16 steps, or one without a duration.
        """
        from scipy.optimize import nnls  # slow to import, and only a fit needs it

        if len(steps) < 16:
            raise CannotFit("expected at least 16 steps", field="steps", value=len(steps))
        seconds = np.array([step.seconds for step in steps])
        if not (seconds > 0).all():
            raise CannotFit("expected durations above 0", field="steps", value=float(seconds.min()))
        columns = {name: np.array([getattr(step, name) for step in steps], float) for name in (*LINES, *SLOPES)}
        few = {name: FEW if name == "rows" else 0 for name in LINES}
        knots = {name: _knots(columns[name], self.support, few[name]) for name in LINES}
        design = [np.ones(len(steps)), *(columns[name] for name in SLOPES)]
        for name in LINES:
            design += _pieces(columns[name], knots[name], few[name])
        x = np.stack(design, axis=1)
        scale = np.maximum(x.max(axis=0), 1e-300)
        x = x / scale
        weight, expected = np.ones(len(steps)), seconds
        for _ in range(30):
            # Relative to what is expected, not to what was measured: of equal steps the fast ones would weigh more.
            root = np.sqrt(weight) / expected
            solution = nnls(x * root[:, None], seconds * root)[0]
            expected = np.maximum(x @ solution, 1e-3 * seconds)
            residual = seconds / expected - 1
            deviation = max(1.4826 * float(np.median(np.abs(residual))), 1e-9)
            weight = np.minimum(1.0, self.huber * deviation / np.maximum(np.abs(residual), 1e-300))
        found = iter((solution / scale).tolist())
        self.overhead_ = next(found)
        self.slopes_ = {name: next(found) for name in SLOPES}
        self.lines_ = {name: _line(knots[name], [next(found) for _ in knots[name]], few[name]) for name in LINES}
        self.largest_ = {name: int(column.max()) for name, column in columns.items()}
        self.points_ = len(steps)
        return self

    def predict(self, steps: Sequence[Step]) -> Floats:
        """Seconds of each step, shape (n,).

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        return np.array([self._at(step) for step in steps])

    def errors(self, steps: Sequence[Step]) -> Floats:
        """Predicted over measured, less 1, shape (n,).

        Raises:
            NotFitted: before `fit`.
        """
        measured = np.array([step.seconds for step in steps])
        errors: Floats = self.predict(steps) / measured - 1
        return errors

    def seconds(self, batch: Batch) -> float:
        """`predict` for one batch, to the last bit.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        return self._at(describe(batch, self.page_tokens))

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """As `StepTime.decode_seconds`."""
        self._require_fit()
        found = []
        known: dict[int, float] = {}
        for i in range(steps):
            seen = decodes * pages(longest + i, self.page_tokens)
            if seen not in known:
                known[seen] = self._at(Step(decodes, seen, 0, decodes, 0, decodes))
            found.append(known[seen])
        return found

    def in_range(self, batch: Batch) -> bool:
        """Whether every feature of the batch was measured so large."""
        step = describe(batch, self.page_tokens)
        return all(getattr(step, name) <= most for name, most in self.largest_.items())

    def _at(self, step: Step) -> float:
        slopes, lines = self.slopes_, self.lines_
        return (
            self.overhead_
            + slopes["decodes"] * step.decodes
            + slopes["chunks"] * step.chunks
            + slopes["outputs"] * step.outputs
            + lines["rows"].at(step.rows)
            + lines["decode_attention"].at(step.decode_attention)
            + lines["chunk_attention"].at(step.chunk_attention)
        )

    # -- the file ----------------------------------------------------------------------------------------------------

    def document(
        self,
        *,
        errors: Floats,
        repeat_spread: float,
        provenance: dict[str, Any],
        yardsticks: Mapping[int, float] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """What `strict.write_yaml` writes, and `read_engine_steps` reads as the same model.

        Args:
            errors: predicted / measured − 1 of steps that were held out. yardsticks: as in the file.

        Raises:
            NotFitted: before `fit`.
        """
        self._require_fit()
        size = np.abs(errors)
        return {
            "schema": SCHEMA,
            "page_tokens": self.page_tokens,
            "overhead": self.overhead_,
            "slopes": dict(self.slopes_),
            "lines": {name: line.model_dump() for name, line in self.lines_.items()},
            "largest": dict(self.largest_),
            "points": self.points_,
            "heldout_median_error": float(np.median(size)),
            "heldout_p90_error": float(np.quantile(size, 0.9)),
            "repeat_spread": repeat_spread,
            "yardsticks": dict(yardsticks),
            "provenance": provenance,
        }

    @classmethod
    def from_file(cls, file: EngineStepsFile) -> EngineSteps:
        """The model that a file describes."""
        made = cls(file.page_tokens)
        made.overhead_, made.slopes_, made.lines_ = file.overhead, dict(file.slopes), dict(file.lines)
        made.largest_, made.points_ = dict(file.largest), file.points
        return made


def read_engine_steps_file(path: Path) -> EngineStepsFile:
    """What a YAML file says.

    Raises:
        BadInput: a file that cannot be read, or breaks the schema.
    """
    return checked(EngineStepsFile, read_yaml(path), path)


def read_engine_steps(path: Path) -> EngineSteps:
    """The model in a YAML file.

    Raises:
        BadInput: as `read_engine_steps_file`.
    """
    return EngineSteps.from_file(read_engine_steps_file(path))


def _knots(column: Floats, support: int, few: int) -> list[int]:
    """Where a broken line may bend: at 1, 2, 3, 4, 6, 8, 12, …, and at every number up to `few`, as far as the data go.

    Each has enough data before it.
    """
    above = np.sort(column[column > 0])
    if not len(above):
        return []
    most, known = int(above[-1]), 0
    octaves = (1 << i for i in range(most.bit_length()))
    knots: list[int] = []
    for knot in sorted({*range(1, few + 1), *(each for octave in octaves for each in (octave, octave * 3 // 2))}):
        below = int(np.searchsorted(above, knot, side="right"))
        if knot < most and below - known >= support:
            knots.append(knot)
            known = below
    if knots and len(above) - known < support:
        knots.pop()
    return [*knots, most]


def _pieces(column: Floats, knots: Sequence[int], few: int) -> list[Floats]:
    """What a broken line is the sum of, a column a knot: its levels up to `few`, and from there on what it rises by.

    A level counts in full at its knot, less and less towards the next on either side, and the last beyond it too. A
    rise is how far along its piece a point lies, 0 to 1; beyond the last knot, further than 1.
    """
    levels = [knot for knot in knots if knot <= few]
    pieces: list[Floats] = [np.interp(column, [0, *levels], each) for each in np.eye(len(levels) + 1)[1:]]
    for before, knot in itertools.pairwise([*(levels[-1:] or [0]), *knots[len(levels) :]]):
        share = (column - before) / (knot - before)
        pieces.append(np.maximum(share, 0.0) if knot == knots[-1] else np.clip(share, 0.0, 1.0))
    return pieces


def _line(knots: list[int], found: Sequence[float], few: int) -> BrokenLine:
    """The broken line that has so much of each piece."""
    pieces = _pieces(np.array(knots, float), knots, few)
    values = sum((amount * piece for amount, piece in zip(found, pieces, strict=True)), np.zeros(len(knots)))
    return BrokenLine(knots=knots, values=values.tolist())
