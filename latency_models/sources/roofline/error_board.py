"""How far predictions from data sheets were off rows that were measured: a summary that comes with the package.

`python -m benchmarks.error_board` makes it of 5,221 measured rows. A cell has the rows of one model on one device in
one format, of one engine or of all; where the model was not measured, one of models like it. Errors are of mean TPOT,
predicted over measured, minus 1, by source roofline as it is used.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from latency_models.deployment.models import ExpertFFN, LatentAttention, Model, load_model
from latency_models.io.builtin_files import FOLDER
from latency_models.io.config_io import Strict, checked
from latency_models.sources.roofline.placement import Placement
from workloads.json_files import read_json_object

SUMMARY = FOLDER / "error-board.json"

LIKE = {"dense": "dense models", "experts": "mixtures of experts", "latent": "models with latent attention"}


class Cell(Strict):
    """Measured rows that are alike; `model` or `engine` "": all of the `family`, or all engines.

    `bias`, `median`, `p90`: of the errors of TPOT. `spread`: root mean square of their logarithms.
    """

    family: Literal["dense", "experts", "latent"]
    model: str = ""
    engine: str = ""
    hardware: str
    precision: Literal["bf16", "fp8", "fp4", "int4"]
    rows: PositiveInt
    bias: float
    median: NonNegativeFloat
    p90: NonNegativeFloat
    spread: NonNegativeFloat

    @property
    def own(self) -> bool:
        """True if these are rows of the model itself, on one engine."""
        return bool(self.model and self.engine)

    def sentence(self) -> str:
        """The error of rows like these, in a sentence without a full stop."""
        model = self.model or LIKE[self.family]
        engine = f", {self.engine}" if self.engine else ""
        way = "slow" if self.bias > 0 else "fast"
        bias = f", {100 * abs(self.bias):.0f} % too {way} on the whole" if abs(self.bias) >= BIASED else ""
        return (
            f"measured rows like this one ({model} in {self.precision} on {self.hardware}{engine}) were "
            f"{100 * self.median:.0f} % off in the median of TPOT ({self.rows} rows{bias})"
        )


BIASED = 0.05
"""Smallest bias that is worth a word."""


class Summary(Strict):
    """The file."""

    schema_: Literal["twin.error-board/1"] = Field(alias="schema")
    source: str
    cells: list[Cell]


@cache
def built_in_board() -> Summary:
    """The summary that comes with the package."""
    return checked(Summary, read_json_object(SUMMARY), SUMMARY)


def family(model: Model) -> Literal["dense", "experts", "latent"]:
    """Dense, experts or latent: models with kernels of their own."""
    if isinstance(model.attention, LatentAttention):
        return "latent"
    return "experts" if isinstance(model.ffn, ExpertFFN) else "dense"


def board_cell(model: Model, hardware: str, placement: Placement, engine: str = "vllm") -> Cell | None:
    """The measured rows most like a deployment: of the model and engine, of the model, of models like it; or None."""
    sparse = isinstance(model.ffn, ExpertFFN)
    precision = FOUR_BITS.get(placement.experts if sparse else placement.weights)
    cells = {
        (cell.model, cell.engine): cell
        for cell in built_in_board().cells
        if (cell.family, cell.hardware, cell.precision) == (family(model), hardware, precision)
    }
    name = next((name for name, _ in cells if name and _alike(load_model(name), model)), "")
    keys = ((name, engine), (name, ""), ("", engine), ("", ""))
    return next((cells[key] for key in keys if key in cells), None)


def _alike(measured: Model, model: Model) -> bool:
    """True if two models have the same shapes: those of one name in two versions."""
    return (measured.layers, measured.hidden_size, measured.vocabulary, measured.attention, measured.ffn) == (
        model.layers, model.hidden_size, model.vocabulary, model.attention, model.ffn
    )  # fmt: skip


FOUR_BITS: dict[str, str] = {"bf16": "bf16", "fp8": "fp8", "fp4": "fp4", "mxfp4": "fp4", "int4": "int4"}
"""Precisions of measured rows by the formats of weights."""
