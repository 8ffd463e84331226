"""Kernel latencies of one layer of a 4-bit model with error compensators: the file `twin.ec-tables/1`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from latency_models.io.config_io import Strict, checked, read_yaml
from workloads.errors import BadInput

LayerType: TypeAlias = Literal["qkv", "o", "gate_up", "down"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)


class Selection(Strict):
    """The set S of modules that carry an error compensator. Exactly one of the two fields is given.

    Attributes:
        density: share of the modules of every layer type.
        layers: numbers of the layers, from 0, by layer type; a type that is left out has none.
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
        """Number of compensated modules among the `layers` modules of one type; with a density it may be fractional."""
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
