"""Source `ec_tables`: 4-bit models with error compensators (EC), from kernel latencies by token count (SPEAR 4.3).

For each type of linear layer there are two tables over token counts M: ℓ_W4(M) without a compensator, ℓ_EC(M) with
one. ℓ_attn(M) is a third. With S the set of modules that carry a compensator, a pass over M tokens takes

    T_S(M) = Σ over layers of ℓ_attn(M) + Σ over layer types of (ℓ_EC(M) where S has it, else ℓ_W4(M)),

linear between the measured M. All tables share their M, so that T_S is such a table too. The file has the schema
`twin.ec-tables/1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict, checked, read_yaml
from latency_models.io.files import FilePath
from latency_models.sources.registry import SourceSpec, register
from latency_models.step_time import StepTime, Unknown
from schedulers.batches import Batch
from schedulers.step_policies import interpolate
from workloads.errors import BadInput

LayerType: TypeAlias = Literal["qkv", "o", "gate_up", "down"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)


class Selection(Strict):
    """The set S of modules with a compensator: a share of every layer type, or numbers of layers by type."""

    density: float | None = Field(default=None, ge=0, le=1)
    layers: dict[LayerType, list[NonNegativeInt]] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Selection:
        if (self.density is None) == (self.layers is None):
            raise ValueError("expected either density or layers")
        for name, numbers in (self.layers or {}).items():
            if len(set(numbers)) < len(numbers):
                raise BadInput("expected each layer once", field=f"layers.{name}", value=numbers)
        return self

    def modules(self, kind: LayerType, layers: int) -> float:
        """Number of compensated modules among the `layers` modules of one type; with a density it may be fractional."""
        if self.density is not None:
            return self.density * layers
        numbers = (self.layers or {}).get(kind, [])
        beyond = [number for number in numbers if number >= layers]
        if beyond:
            raise BadInput(f"expected layers below {layers}", field=f"selection.layers.{kind}", value=beyond[0])
        return len(numbers)


class LayerTables(Strict):
    """Latencies of one layer's kernels, seconds by token counts M from 1: the file `twin.ec-tables/1`."""

    schema_: Literal["twin.ec-tables/1"] = Field(alias="schema")
    layers: PositiveInt
    tokens: list[PositiveInt] = Field(min_length=2)
    w4: dict[LayerType, list[PositiveFloat]]
    ec: dict[LayerType, list[PositiveFloat]]
    attention: list[NonNegativeFloat]
    source: str = Field(min_length=1)

    @model_validator(mode="after")
    def _complete(self) -> LayerTables:
        if self.tokens[0] != 1:
            raise BadInput("expected 1, for steps of a single decode", field="tokens[0]", value=self.tokens[0])
        for before, after in pairwise(self.tokens):
            if after <= before:
                raise BadInput(f"expected token counts that increase, found {after} after {before}", field="tokens")
        for name, tables in (("w4", self.w4), ("ec", self.ec)):
            for kind in LAYER_TYPES:
                if kind not in tables:
                    raise BadInput("expected this table, which is missing", field=f"{name}.{kind}")
                self._check_length(f"{name}.{kind}", tables[kind])
        self._check_length("attention", self.attention)
        return self

    def _check_length(self, field: str, table: list[float]) -> None:
        if len(table) != len(self.tokens):
            expected = f"expected {len(self.tokens)} entries, one for each of tokens, found {len(table)}"
            raise BadInput(expected, field=field)

    def document(self) -> dict[str, Any]:
        """Content of the file, which `read_layer_tables` reads as equal tables."""
        return self.model_dump(by_alias=True)

    def iteration(self, selection: Selection) -> list[float]:
        """The time T_S at each of `tokens`, seconds."""
        shares = [(kind, selection.modules(kind, self.layers)) for kind in LAYER_TYPES]
        totals = []
        for i in range(len(self.tokens)):
            seconds = self.layers * self.attention[i]
            for kind, carrying in shares:
                seconds += (self.layers - carrying) * self.w4[kind][i] + carrying * self.ec[kind][i]
            totals.append(seconds)
        return totals


def read_layer_tables(path: Path) -> LayerTables:
    """Read the tables in a YAML file."""
    return checked(LayerTables, read_yaml(path), path)


Passes: TypeAlias = Literal["separate", "joint"]
"""Passes of a step with d decodes and c prompt tokens: T(d) + T(c), the estimate of SPEAR's scheduler, or T(d + c)."""


@dataclass(eq=False)
class EcTables(StepTime):
    """Step times of a compensated model, and the latency table that the SLO scheduler uses.

    Context lengths have no influence: the paper profiles attention by tokens, like the rest. `passes`: prompt tokens
    run in a pass of their own, padded to `pad_to` tokens ("regular chunked prefill", SPEAR 4.3). `spread`: relative
    uncertainty of T_S.
    """

    tables: LayerTables
    selection: Selection
    passes: Passes = "separate"
    pad_to: int = 0
    spread: float | None = None

    def __post_init__(self) -> None:
        self._outside: dict[str, float] = {}
        self._tokens = self.tables.tokens
        self._seconds = self.tables.iteration(self.selection)

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
        for factor in self.factors(scores).values():
            varied._seconds = [seconds * factor for seconds in self._seconds]
        return varied

    def outside(self) -> dict[str, float]:
        """On the axis `tokens`. The last slope continues beyond the tables."""
        return dict(self._outside)

    def chunk_table(self) -> tuple[list[int], list[float]]:
        """Token counts and T_S at each: the table of `schedulers.step_policies.SloChunks`."""
        for i, (before, after) in enumerate(pairwise(self._seconds), start=1):
            if after <= before:
                expected = (
                    f"expected T_S to grow with the tokens for the SLO scheduler, found {after:g} s at"
                    f" {self._tokens[i]} after {before:g} s at {self._tokens[i - 1]}"
                )
                raise BadInput(expected, field=f"tokens[{i}]")
        return list(self._tokens), list(self._seconds)


@register
class EcTablesSpec(SourceSpec):
    """A 4-bit model with error compensators (SPEAR 4.3): `path` or `tables`, and the fields of `EcTables`."""

    source: Literal["ec_tables"]
    path: FilePath | None = None
    tables: LayerTables | None = None
    selection: Selection
    passes: Passes = "separate"
    pad_to: int = Field(default=0, ge=0)
    spread: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_source(self) -> EcTablesSpec:
        if (self.path is None) == (self.tables is None):
            raise ValueError("expected either path or tables")
        return self

    def build(self, base: Path) -> EcTables:
        tables = self.tables
        if tables is None:
            assert self.path is not None
            tables = read_layer_tables(base / self.path)
        return EcTables(tables, self.selection, self.passes, self.pad_to, self.spread)

    def provenance(self) -> dict[str, Any]:
        origin = {"path": self.path} if self.tables is None else {"note": self.tables.source}
        return {"source": self.source, **origin}
