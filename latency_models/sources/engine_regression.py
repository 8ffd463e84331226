"""Source `engine_regression`: step times of a whole engine, by regression on steps that were timed on it.

    t = β + δ·decodes + κ·chunks + ω·outputs
          + f₁(rows) + f₂(decodes · longest) + f₃(Σ over chunks of tokens · (context + tokens))
          + τ·transfers + ρ·received + σ·drafted + φ·drafted_kv

Each f is a broken line through 0 whose knots follow the data, so that knees are kept: a cache that overflows, a product
that changes its algorithm. The lines never fall, with one exception: f₁ has a level of its own for each small number of
rows, since CPUs compute products of few rows in different ways, and 3 rows may take longer than 4. `longest` is a
feature because attention over decodes of unequal lengths is padded to the longest, in whole blocks. A decode engine
takes the caches of `transfers` sequences, with `received` tokens, before its step; other engines have none. With
speculative decoding, `drafted` decodes verify drafts over `drafted_kv` tokens, and the others make up f₂.

The model includes the host's time. It is valid for the engine, the model and the machine that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from latency_models.calibration import Provenance
from latency_models.fitting.estimator import CannotFit, Estimator, Floats, fit_huber
from latency_models.fitting.linear import BrokenLine, basis, choose_knots, from_basis
from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import FilePath
from latency_models.sources.registry import SourceSpec, register
from latency_models.step_time import StepTime, Unknown
from schedulers.batches import Batch


@dataclass(frozen=True, slots=True)
class Step:
    """Features of one step, and its duration.

    `rows`: prompt tokens, decodes and their drafts. `decode_attention`: decodes without drafts × tokens of the longest,
    in whole blocks; where attention pads nothing, the tokens of all. `chunk_attention`: Σ tokens · (context + tokens).
    `outputs`: rows of the LM head. `seconds`: measured; 0 in a prediction. `transfers`: decodes admitted with a cache
    from a prefill engine, `received` their prompt tokens. `drafted`: decodes that verify drafts, `drafted_kv` their
    tokens.
    """

    rows: int
    decode_attention: int
    chunk_attention: int
    decodes: int
    chunks: int
    outputs: int
    seconds: float = 0.0
    transfers: int = 0
    received: int = 0
    drafted: int = 0
    drafted_kv: int = 0


def describe(batch: Batch, block_size: int, seconds: float = 0.0) -> Step:
    """Features of a batch. `block_size`: as in `EngineRegression`. Decodes with drafts are computed like chunks."""
    pairs = received = drafted = drafted_kv = 0
    for sequence in batch.transferred:
        received += sequence.request.prompt_tokens
    for chunk in batch.chunks:
        pairs += chunk.tokens * (chunk.context + chunk.tokens)
    longest = batch.longest_decode
    if batch.draft_tokens:
        drafted, drafted_kv = sum(tokens > 0 for tokens in batch.draft_tokens), batch.drafted_kv
        longest = batch.longest_undrafted
    undrafted = batch.n_decodes - drafted
    return Step(
        rows=batch.tokens,
        decode_attention=undrafted * whole_blocks(longest, block_size) if block_size else batch.decode_kv - drafted_kv,
        chunk_attention=pairs,
        decodes=batch.n_decodes,
        chunks=len(batch.chunks),
        outputs=batch.outputs,
        seconds=seconds,
        transfers=len(batch.transferred),
        received=received,
        drafted=drafted,
        drafted_kv=drafted_kv,
    )


def whole_blocks(tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks."""
    return -(-tokens // block_size) * block_size


SCHEMA = "twin.engine-steps/2"


class EngineRegressionFile(Strict):
    """The file `twin.engine-steps/2`. Times are in seconds.

    `block_size`: tokens to which attention pads decodes; 0: none. `overhead`, `slopes`, `lines`: β, then δ κ ω and the
    broken lines by name. `repeat_spread`, `round_spread`: relative deviation among equal steps, and among rounds of the
    profile. `clock`: `wall`, or `direct`: CPU time of one thread. `frontend`: fields of `system.frontend`.
    """

    schema_: Literal["twin.engine-steps/2"] = Field(alias="schema")
    block_size: NonNegativeInt
    overhead: NonNegativeFloat
    slopes: dict[str, NonNegativeFloat]
    lines: dict[str, BrokenLine]
    largest: dict[str, int]
    points: PositiveInt
    heldout_median_error: NonNegativeFloat
    heldout_p90_error: NonNegativeFloat
    repeat_spread: NonNegativeFloat
    round_spread: NonNegativeFloat = 0.0
    clock: Literal["wall", "direct"] = "wall"
    frontend: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    provenance: Provenance


def read_engine_regression_file(path: Path) -> EngineRegressionFile:
    return checked(EngineRegressionFile, read_yaml(path), path)


LINES = ("rows", "decode_attention", "chunk_attention")
SLOPES = ("decodes", "chunks", "outputs", "transfers", "received", "drafted", "drafted_kv")

DENSE_ROWS = 32
"""Largest number of rows with a level of its own, for numbers that were timed often enough."""


MACHINE = 0.015
"""Smallest deviation of a machine's speed between its profile and a run, which is longer than the profile shows:
forecasts of mean TPOT by CPU time are off by 1.7 %."""

BEYOND = 0.4
"""Deviation of the logarithm of slopes beyond the largest steps: a cache that overflows doubles one."""

MORE_STEPS = "more profiling rounds"


class EngineRegression(Estimator, StepTime):
    """The regression above: least squares of relative errors, with no coefficient below 0.

    `fit` sets `overhead_`, `slopes_`, `lines_`, `largest_` (of each feature) and `points_`; `from_file` also the errors
    of held-out steps and the deviations of the file. `support`: minimum number of steps for each piece of a broken
    line. `huber`: steps further than this many deviations off count by their distance, not by its square.
    """

    overhead_: float
    slopes_: dict[str, float]
    heldout_median_error_: float | None = None
    heldout_p90_error_: float = 0.0
    repeat_spread_: float = 0.0
    round_spread_: float = 0.0
    lines_: dict[str, BrokenLine]

    def __init__(self, block_size: int = 16, *, support: int = 20, huber: float = 1.5) -> None:
        self.block_size = block_size
        self.support = support
        self.huber = huber

    def fit(self, steps: Sequence[Step]) -> Self:
        """Fit the model to timed steps."""
        if len(steps) < 16:
            raise CannotFit("expected at least 16 steps", field="steps", value=len(steps))
        seconds = np.array([step.seconds for step in steps])
        if not (seconds > 0).all():
            raise CannotFit("expected durations above 0", field="steps", value=float(seconds.min()))
        columns = {name: np.array([getattr(step, name) for step in steps], float) for name in (*LINES, *SLOPES)}
        dense = {name: DENSE_ROWS if name == "rows" else 0 for name in LINES}
        knots = {name: choose_knots(columns[name], self.support, dense[name]) for name in LINES}
        design = [np.ones(len(steps)), *(columns[name] for name in SLOPES)]
        for name in LINES:
            design += basis(columns[name], knots[name], dense[name])
        fit = fit_huber(np.stack(design, axis=1), seconds, self.huber, relative=True)
        coefficients = iter(fit.coefficients.tolist())
        self.overhead_ = next(coefficients)
        self.slopes_ = {name: next(coefficients) for name in SLOPES}
        self.lines_ = {
            name: from_basis(knots[name], [next(coefficients) for _ in knots[name]], dense[name]) for name in LINES
        }
        self.largest_ = {name: int(column.max()) for name, column in columns.items()}
        self.points_ = len(steps)
        return self

    def predict(self, steps: Sequence[Step]) -> Floats:
        """Seconds of each step, shape (n,)."""
        self._require_fit()
        return np.array([self._at(step) for step in steps])

    def errors(self, steps: Sequence[Step]) -> Floats:
        """Relative errors (predicted / measured − 1), shape (n,)."""
        measured = np.array([step.seconds for step in steps])
        errors: Floats = self.predict(steps) / measured - 1
        return errors

    def seconds(self, batch: Batch) -> float:
        """The value of `predict` for one batch, bit for bit."""
        self._require_fit()
        return self._at(describe(batch, self.block_size))

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        self._require_fit()
        durations = []
        by_attention: dict[int, float] = {}
        for i in range(steps):
            attention = decodes * whole_blocks(longest + i, self.block_size) if self.block_size else kv + decodes * i
            if attention not in by_attention:
                by_attention[attention] = self._at(Step(decodes, attention, 0, decodes, 0, decodes))
            durations.append(by_attention[attention])
        return durations

    def unknowns(self) -> tuple[Unknown, ...]:
        """Parts of a step by the error of held-out steps; none for a model without a file."""
        if self.heldout_median_error_ is None:
            return ()
        # Half of normal errors are below 0.674 deviations. Scatter of equal steps is no error of the model.
        systematic = math.sqrt(max((self.heldout_median_error_ / 0.674) ** 2 - self.repeat_spread_**2, 0.0))
        part = max(systematic, 0.5 * self.heldout_median_error_, 0.002)
        # A run is another round: what rounds of the profile differ by, it may differ by from all of them.
        drifts, about = self.round_spread_ > MACHINE, "speed of the machine since it was profiled"
        speed = max(self.round_spread_, MACHINE)
        return (
            Unknown("machine", about, "held out" if drifts else "assumed", speed, "a profile beside it"),
            Unknown("fixed", "time of a step that does not depend on its rows", "held out", part, MORE_STEPS),
            *(Unknown(name, f"time by {name.replace('_', ' ')}", "held out", part, MORE_STEPS) for name in LINES),
            Unknown("beyond", "slopes beyond the largest steps", "extrapolated", BEYOND, "larger steps"),
        )

    def scatter(self) -> float:
        """The deviation of steps, from the P90 error of held-out ones (taken as normal) and the machine's drift."""
        return math.hypot(self.heldout_p90_error_ / 1.645, MACHINE) if self.heldout_p90_error_ else 0.0

    def vary(self, scores: Mapping[str, float]) -> EngineRegression:
        factors = self.factors(scores)
        machine = factors.get("machine", 1.0)
        lines = {name: machine * factors.get(name, 1.0) for name in LINES}
        varied = self._scaled(machine * factors.get("fixed", 1.0), lines, factors.get("beyond", 1.0))
        varied.heldout_median_error_ = None
        return varied

    def at_speed(self, factor: float) -> EngineRegression:
        """The model of a machine on which every step takes `factor` times as long."""
        return self._scaled(factor, dict.fromkeys(LINES, factor))

    def _scaled(self, fixed: float, lines: Mapping[str, float], beyond: float = 1.0) -> EngineRegression:
        """The model with factors on overhead and slopes, on lines, and on the slopes of lines beyond their knots."""
        self._require_fit()
        scaled = copy(self)
        scaled.overhead_ = self.overhead_ * fixed
        scaled.slopes_ = {name: slope * fixed for name, slope in self.slopes_.items()}
        scaled.lines_ = {name: line.scaled(lines[name], beyond) for name, line in self.lines_.items()}
        return scaled

    def _at(self, step: Step) -> float:
        slopes, lines = self.slopes_, self.lines_
        seconds = (
            self.overhead_
            + slopes["decodes"] * step.decodes
            + slopes["chunks"] * step.chunks
            + slopes["outputs"] * step.outputs
            + lines["rows"].at(step.rows)
            + lines["decode_attention"].at(step.decode_attention)
            + lines["chunk_attention"].at(step.chunk_attention)
        )
        if step.transfers:  # files of earlier versions have no slopes for it
            seconds += slopes.get("transfers", 0.0) * step.transfers + slopes.get("received", 0.0) * step.received
        if step.drafted:
            seconds += slopes.get("drafted", 0.0) * step.drafted + slopes.get("drafted_kv", 0.0) * step.drafted_kv
        return seconds

    def document(
        self,
        *,
        errors: Floats,
        repeat_spread: float,
        round_spread: float = 0.0,
        provenance: dict[str, Any],
        clock: Literal["wall", "direct"] = "wall",
        frontend: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Content of the file, for `config_io.write_yaml`. `errors`: predicted / measured − 1, held out, (n,)."""
        self._require_fit()
        size = np.abs(errors)
        return {
            "schema": SCHEMA,
            "block_size": self.block_size,
            "overhead": self.overhead_,
            "slopes": dict(self.slopes_),
            "lines": {name: line.model_dump() for name, line in self.lines_.items()},
            "largest": dict(self.largest_),
            "points": self.points_,
            "heldout_median_error": float(np.median(size)),
            "heldout_p90_error": float(np.quantile(size, 0.9)),
            "repeat_spread": repeat_spread,
            "round_spread": round_spread,
            "clock": clock,
            **({"frontend": dict(frontend)} if frontend else {}),
            "provenance": provenance,
        }

    @classmethod
    def from_file(cls, file: EngineRegressionFile) -> EngineRegression:
        model = cls(file.block_size)
        names = EngineRegressionFile.model_fields.keys() - {"schema_", "block_size", "clock", "frontend", "provenance"}
        vars(model).update({f"{name}_": getattr(file, name) for name in names})
        return model


def read_engine_regression(path: Path) -> EngineRegression:
    """Read the model in a file."""
    return EngineRegression.from_file(read_engine_regression_file(path))


@register
class EngineRegressionSpec(SourceSpec):
    """A regression on timed steps of the engine to be predicted: `path` is the file that `twin validate` writes."""

    source: Literal["engine_regression"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        return read_engine_regression(base / self.path)
