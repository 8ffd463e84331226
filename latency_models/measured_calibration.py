"""The file of `twin calibrate run`: what one device takes for one model, operation by operation.

It holds kernel tables, of which a serving scenario makes step times (`source: calibration`); the α/β lines of a decode
step (which an AFD scenario takes as its `calibration`); tables of 4-bit layers with and without error compensators; and
of every operation how well what it predicts was met at sizes that were held out. docs/reference/calibration-file.md has
every field.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.calibration import Calibration, FitReport, Line, Pair, Provenance
from latency_models.ec_tables import LayerTables
from latency_models.kernel_tables.tables import HeldOut, KernelTables
from latency_models.models import Model
from latency_models.strict import Strict, checked, read_yaml, write_yaml
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.kernel_tables.step_time import KernelTableStepTime

SCHEMA = "twin.measured-calibration/1"


class FittedRegime(Strict):
    """A line t = alpha·x + beta, seconds, and where it holds.

    Attributes:
        where: what else was held fixed: "batch 4"; empty if nothing.
        median_residual, worst_residual: of |line - measured| / measured.
        fit: absent where times do not grow with x; the line is then their mean.
    """

    where: str = ""
    range: Pair
    alpha: NonNegativeFloat
    beta: NonNegativeFloat
    median_residual: NonNegativeFloat
    worst_residual: NonNegativeFloat
    fit: FitReport | None = None


class Operation(Strict):
    """How well one operation is known.

    Attributes:
        via: what ran: "triton", or "reference" or "torch" where there was no kernel.
        axis: x of the lines.
        points: measured; of which `held_out.points` enter neither tables nor lines.
        repeat_spread: how far the same point differs from one round of the run to another: the median over points of
            (longest - shortest) / median.
        held_out: errors of interpolation between the other points, as a simulation predicts.
        allowed: of the median: 0.05, or 0.1 where `repeat_spread` is above 0.05.
        lines: where there are several, the time has a knee between them.
    """

    via: str
    axis: str
    points: PositiveInt
    repeat_spread: NonNegativeFloat
    held_out: HeldOut | None = None
    allowed: NonNegativeFloat
    holds: bool
    lines: list[FittedRegime] = Field(default_factory=list)


class StepOverhead(Strict):
    """What a whole step takes beyond its operations timed one by one: seconds + factor · their sum.

    The factor is what operations lose when others run between them: caches, branch predictors, fresh memory.

    Attributes:
        seconds, factor: fitted to the composed steps. 0 and 1 where none were measured.
        steps: those steps: chunk, decodes, context of each, seconds measured, and predicted with the two.
        median_error: of |predicted - measured| / measured.
    """

    seconds: NonNegativeFloat
    factor: PositiveFloat = 1.0
    steps: list[dict[str, float]] = Field(default_factory=list)
    median_error: NonNegativeFloat | None = None


class MeasuredCalibration(Strict):
    """The file.

    Attributes:
        row_tile: rows that linear layers compute at once, as `KernelTableSettings` has it.
        tables: absent if the run left out what they need. communication: of `requests` there and back.
        attention, ffn: of a whole decode step. ec: absent if not measured.
        skipped: what was not measured, and why.
    """

    schema_: Literal["twin.measured-calibration/1"] = Field(alias="schema")
    name: Annotated[str, Field(min_length=1)]
    provenance: Provenance
    model: Model
    dtype: str
    row_tile: PositiveInt
    overhead: StepOverhead
    attention: Line | None = None
    ffn: Line | None = None
    communication: Line | None = None
    operations: dict[str, Operation]
    skipped: dict[str, str] = Field(default_factory=dict)
    ec: LayerTables | None = None
    tables: KernelTables | None = None

    def to_yaml(self) -> str:
        """The file's text; reading it gives an equal calibration."""
        return write_yaml(self.model_dump(mode="json", by_alias=True, exclude_none=True))

    def step_time(self) -> KernelTableStepTime:
        """Step times of this device and model.

        Raises:
            BadInput: a run that left out what they need.
        """
        from latency_models.kernel_tables.parallel import KernelTableSettings
        from latency_models.kernel_tables.step_time import KernelTableStepTime

        if self.tables is None:
            raise BadInput(
                "expected tables, which were not measured; run it with layers, attention and head", field="tables"
            )
        settings = KernelTableSettings(
            model=self.model.name,
            overhead=self.overhead.seconds,
            time_scale=self.overhead.factor,
            row_tile=self.row_tile,
        )
        return KernelTableStepTime(self.tables, settings, self.model)

    def lines(self) -> Calibration:
        """α and β of a decode step, as an AFD scenario takes them.

        Raises:
            BadInput: a component that was not measured.
        """
        for name in ("attention", "ffn", "communication"):
            if getattr(self, name) is None:
                expected = "expected this line, which was not measured; run it with layers, attention and communication"
                raise BadInput(expected, field=name)
        document = {
            "schema": "twin.calibration/1",
            "name": self.name,
            "time_unit": "seconds",
            "scope": "step",
            "attention": self.attention,
            "ffn": self.ffn,
            "communication": self.communication,
            "provenance": self.provenance,
        }
        return checked(Calibration, document, None)


def read_measured_calibration(path: Path) -> MeasuredCalibration:
    """The file at `path`.

    Raises:
        BadInput: it cannot be read or breaks the schema.
    """
    return from_document(read_yaml(path), path)


def from_document(document: dict[str, Any], path: Path | None = None) -> MeasuredCalibration:
    """What a document holds; `path` is named in errors.

    Raises:
        BadInput: it breaks the schema.
    """
    return checked(MeasuredCalibration, document, path)
