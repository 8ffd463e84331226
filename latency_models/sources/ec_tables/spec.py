"""The scenario section of `source: ec_tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from latency_models.io.paths import FilePath
from latency_models.sources.ec_tables.step_time import EcTables, Passes
from latency_models.sources.ec_tables.tables import LayerTables, Selection, read_layer_tables
from latency_models.sources.specification import SourceSpec, register


@register
class EcTablesSpec(SourceSpec):
    """A 4-bit model with error compensators (SPEAR 4.3).

    Attributes:
        path, tables: the latency tables, in a file or in the scenario; one of the two.
        selection: which modules carry a compensator.
        passes, pad_to, spread: as for `EcTables`.
    """

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
