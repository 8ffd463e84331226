"""Step times of a 4-bit model with error compensators (EC), from kernel latencies by token count (SPEAR 4.3).

For each type of linear layer there are two tables over token counts M: ℓ_W4(M) without a compensator, ℓ_EC(M) with one.
ℓ_attn(M) is a third. With S the set of modules that carry a compensator, a pass over M tokens takes

    T_S(M) = Σ over layers of ℓ_attn(M) + Σ over layer types of (ℓ_EC(M) where S has it, else ℓ_W4(M)),

linear between the measured M. All tables share their M, so that T_S is such a table too.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, TypeAlias

from latency_models.sources.ec_tables.tables import LayerTables, Selection
from latency_models.step_time import StepTime
from latency_models.unknowns import Unknown
from schedulers.batches import Batch
from schedulers.chunking import interpolate
from workloads.errors import BadInput

Passes: TypeAlias = Literal["separate", "joint"]
"""Passes of a step with d decodes and c prompt tokens: T(d) + T(c), the estimate of SPEAR's scheduler, or T(d + c)."""


class EcTables(StepTime):
    """Step times of a compensated model, and the latency table that the SLO scheduler uses.

    Context lengths have no influence: the paper profiles attention by tokens, like the rest.

    Args:
        tables: latencies of one layer's kernels.
        selection: S.
        passes: whether prompt tokens run in a pass of their own beside a step's decodes.
        pad_to: tokens to which a pass with prompt tokens is padded ("regular chunked prefill", SPEAR 4.3); 0: none.
        spread: relative uncertainty of T_S; None: unknown.
    """

    def __init__(
        self,
        tables: LayerTables,
        selection: Selection,
        passes: Passes = "separate",
        pad_to: int = 0,
        spread: float | None = None,
    ) -> None:
        self.tables, self.selection, self.passes, self.pad_to = tables, selection, passes, pad_to
        self.spread = spread
        self._outside: dict[str, float] = {}
        self._tokens, self._seconds = tables.tokens, tables.iteration(selection)

    def select(self, selection: Selection) -> EcTables:
        """The same tables with another selection."""
        return EcTables(self.tables, selection, self.passes, self.pad_to, self.spread)

    def at(self, tokens: int) -> float:
        """The time T_S(tokens), seconds; T_S(0) = 0."""
        if tokens > self._tokens[-1] and tokens > self._outside.get("tokens", 0):
            self._outside["tokens"] = float(tokens)
        return interpolate(self._tokens, self._seconds, tokens)

    def seconds(self, batch: Batch) -> float:
        if not batch.chunks:
            return self.at(batch.decode_tokens)
        if self.passes == "joint":
            return self.at(max(batch.tokens, self.pad_to))
        return self.at(batch.decode_tokens) + self.at(max(batch.prefill_tokens, self.pad_to))

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        return [self.at(decodes)] * steps

    def unknowns(self) -> tuple[Unknown, ...]:
        """All times by one factor, where its spread is stated."""
        if self.spread is None:
            return ()
        return (Unknown("tables", "all times of the tables", "stated", self.spread, "steps of the engine"),)

    def vary(self, scores: Mapping[str, float]) -> EcTables:
        varied = EcTables(self.tables, self.selection, self.passes, self.pad_to)
        for unknown in self.unknowns():
            factor = unknown.factor(scores.get(unknown.name, 0.0))
            varied._seconds = [seconds * factor for seconds in self._seconds]
        return varied

    def outside(self) -> dict[str, float]:
        """On the axis `tokens`. The last slope continues beyond the tables."""
        return dict(self._outside)

    def chunk_table(self) -> tuple[list[int], list[float]]:
        """Token counts and T_S at each: the table of `schedulers.chunking.SloChunks`."""
        for i, (before, after) in enumerate(pairwise(self._seconds), start=1):
            if after <= before:
                expected = (
                    f"expected T_S to grow with the tokens for the SLO scheduler, found {after:g} s at"
                    f" {self._tokens[i]} after {before:g} s at {self._tokens[i - 1]}"
                )
                raise BadInput(expected, field=f"tokens[{i}]")
        return list(self._tokens), list(self._seconds)
