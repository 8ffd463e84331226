"""Step times of a 4-bit model with error compensators (EC), from kernel latencies by token count (SPEAR 4.3).

Per linear layer type two tables over token counts M, ℓ_W4(M) without a compensator and ℓ_EC(M) with one, and ℓ_attn(M).
Under a selection S of the modules that carry one, a pass over M tokens takes

    T_S(M) = Σ over layers of ℓ_attn(M) + Σ over layer types of (ℓ_EC(M) where S has it, else ℓ_W4(M)),

linear between the M that were measured. All tables share these M, so that their sum is itself such a table.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from latency_models.strict import Strict, checked, read_yaml
from schedulers.batches import Batch
from schedulers.chunking import interpolate
from workloads.errors import BadInput

LayerType: TypeAlias = Literal["qkv", "o", "gate_up", "down"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)

Passes: TypeAlias = Literal["separate", "joint"]
"""How a step with d decodes and c prompt tokens runs: T(d) + T(c), as SPEAR's scheduler estimates it, or T(d + c)."""


class Selection(Strict):
    """S: which modules carry an error compensator.

    Attributes:
        density: the same share of the modules of every layer type.
        layers: numbers of the layers, from 0, by layer type; a type that is left out has none. One of the two.
    """

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
        """How many of the `layers` modules of one type carry a compensator; with a density not always a whole number.

        Raises:
            BadInput: a layer that the model does not have.
        """
        if self.density is not None:
            return self.density * layers
        numbers = (self.layers or {}).get(kind, [])
        beyond = [number for number in numbers if number >= layers]
        if beyond:
            raise BadInput(f"expected layers below {layers}", field=f"selection.layers.{kind}", value=beyond[0])
        return len(numbers)


class LayerTables(Strict):
    """Latencies of one layer's kernels: the file `twin.ec-tables/1`. Times are in seconds.

    Attributes:
        layers: how many such layers the model has.
        tokens: M, increasing from 1. Every table has one entry for each.
        w4, ec: by layer type, the 4-bit kernel alone and with an error compensator attached.
        attention: of one layer.
        source: where the figures come from.
    """

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
        """What `strict.write_yaml` writes, and `read_layer_tables` reads as the same tables."""
        return self.model_dump(by_alias=True)

    def iteration(self, selection: Selection) -> list[float]:
        """T_S at each of `tokens`, seconds.

        Raises:
            BadInput: a selection of layers that the model does not have.
        """
        shares = [(kind, selection.modules(kind, self.layers)) for kind in LAYER_TYPES]
        totals = []
        for i in range(len(self.tokens)):
            seconds = self.layers * self.attention[i]
            for kind, carrying in shares:
                seconds += (self.layers - carrying) * self.w4[kind][i] + carrying * self.ec[kind][i]
            totals.append(seconds)
        return totals


def read_layer_tables(path: Path) -> LayerTables:
    """The tables in a YAML file.

    Raises:
        BadInput: a file that cannot be read, or breaks the schema.
    """
    return checked(LayerTables, read_yaml(path), path)


class EcTables:
    """`StepTime` of a compensated model, and the latency table that its SLO scheduler goes by.

    Context lengths do not enter: the paper profiles attention by tokens, as the rest.

    Args:
        tables, selection: what T_S is made of.
        passes: whether prompt tokens run beside a step's decodes in a pass of their own.
        pad_to: tokens to which a pass with prompt tokens is padded ("regular chunked prefill", SPEAR 4.3); 0: none.

    Attributes:
        outside_: {"tokens": the most asked for} once that lay beyond the tables, so that the last slope was prolonged;
            empty while predictions are covered.

    Raises:
        BadInput: a selection of layers that the model does not have.
    """

    def __init__(self, tables: LayerTables, selection: Selection, passes: Passes = "separate", pad_to: int = 0) -> None:
        self.tables, self.selection, self.passes, self.pad_to = tables, selection, passes, pad_to
        self.outside_: dict[str, float] = {}
        self._tokens, self._seconds = tables.tokens, tables.iteration(selection)

    def select(self, selection: Selection) -> EcTables:
        """The same tables under another selection."""
        return EcTables(self.tables, selection, self.passes, self.pad_to)

    def at(self, tokens: int) -> float:
        """T_S(tokens), seconds; T_S(0) = 0."""
        if tokens > self._tokens[-1] and tokens > self.outside_.get("tokens", 0):
            self.outside_["tokens"] = float(tokens)
        return interpolate(self._tokens, self._seconds, tokens)

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds."""
        if not batch.chunks:
            return self.at(batch.n_decodes)
        if self.passes == "joint":
            return self.at(max(batch.tokens, self.pad_to))
        return self.at(batch.n_decodes) + self.at(max(batch.prefill_tokens, self.pad_to))

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """As `StepTime.decode_seconds`."""
        return [self.at(decodes)] * steps

    def chunk_table(self) -> tuple[list[int], list[float]]:
        """Token counts and T_S at each: the table of `schedulers.chunking.SloChunks`.

        Raises:
            BadInput: T_S does not grow from one count to the next, so that no chunk could be found by bisection.
        """
        for i, (before, after) in enumerate(pairwise(self._seconds), start=1):
            if after <= before:
                expected = (
                    f"expected T_S to grow with the tokens for the SLO scheduler, found {after:g} s at"
                    f" {self._tokens[i]} after {before:g} s at {self._tokens[i - 1]}"
                )
                raise BadInput(expected, field=f"tokens[{i}]")
        return list(self._tokens), list(self._seconds)
