"""Source `calibration_file`: the file of `twin calibrate run`, one model on one device, operation by operation.

docs/reference/calibration-file.md describes every field.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.calibration import Calibration, FitReport, Line, Pair, Provenance
from latency_models.deployment.models import Model
from latency_models.io.config_io import Strict, checked, read_yaml, write_yaml
from latency_models.io.files import FilePath
from latency_models.sources.ec_tables import LayerTables
from latency_models.sources.kernel_tables.tables import HeldOut, KernelTables
from latency_models.sources.registry import SourceSpec, register
from latency_models.step_time import StepTime
from workloads.errors import BadInput

if TYPE_CHECKING:
    from latency_models.sources.kernel_tables.spec import KernelTableStepTime

SCHEMA = "twin.measured-calibration/1"


class FittedPiece(Strict):
    """A line t = alpha·x + beta in seconds over a range, and its relative residuals.

    `where`: sizes held fixed ("batch 4"). `fit`: absent where times do not grow with x; the line is then their mean.
    """

    where: str = ""
    range: Pair
    alpha: NonNegativeFloat
    beta: NonNegativeFloat
    median_residual: NonNegativeFloat
    worst_residual: NonNegativeFloat
    fit: FitReport | None = None


class Operation(Strict):
    """Accuracy of one operation's predictions, by `via`: "triton", or "reference" or "torch" without a kernel.

    `points` include `held_out.points`, which enter neither tables nor lines. `repeat_spread`: the median of (longest -
    shortest) / median of a point's repeats. `allowed`: limit of the median error: 0.05, or 0.1 where that is above
    0.05.
    """

    via: str
    axis: str
    points: PositiveInt
    repeat_spread: NonNegativeFloat
    held_out: HeldOut | None = None
    allowed: NonNegativeFloat
    holds: bool
    lines: list[FittedPiece] = Field(default_factory=list)


class StepOverhead(Strict):
    """Duration of a whole step in terms of its operations timed one by one: seconds + factor · their sum.

    Fitted to composed `steps`; 0 and 1 where none were measured. The factor covers caches and branch predictors.
    """

    seconds: NonNegativeFloat
    factor: PositiveFloat = 1.0
    steps: list[dict[str, float]] = Field(default_factory=list)
    median_error: NonNegativeFloat | None = None


class MeasuredCalibration(Strict):
    """The file `twin.measured-calibration/1`; docs/reference/calibration-file.md describes every field."""

    schema_: Literal["twin.measured-calibration/1"] = Field(alias="schema")
    name: Annotated[str, Field(min_length=1)]
    provenance: Provenance
    model: Model
    dtype: str
    row_tile: PositiveInt
    capture_sizes: list[PositiveInt] | None = None
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
        """Step times of the measured device and model."""
        from latency_models.sources.kernel_tables.settings import KernelTableSettings
        from latency_models.sources.kernel_tables.spec import KernelTableStepTime

        if self.tables is None:
            raise BadInput(
                "expected tables, which were not measured; run it with layers, attention and head", field="tables"
            )
        settings = KernelTableSettings(
            model=self.model.name,
            overhead=self.overhead.seconds,
            time_scale=self.overhead.factor,
            row_tile=self.row_tile,
            capture_sizes=tuple(self.capture_sizes or ()),
        )
        return KernelTableStepTime(self.tables, settings, self.model, self.overhead.median_error)

    def lines(self) -> Calibration:
        """The lines α and β of a decode step, for an AFD scenario."""
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
    return from_document(read_yaml(path), path)


def from_document(document: dict[str, Any], path: Path | None = None) -> MeasuredCalibration:
    """Check a document; `path` is named in errors."""
    return checked(MeasuredCalibration, document, path)


@register
class CalibrationFileSpec(SourceSpec):
    """Kernel tables that `twin calibrate run` measured: the file at `path`."""

    source: Literal["calibration_file"]
    path: FilePath

    def build(self, base: Path) -> StepTime:
        return read_measured_calibration(base / self.path).step_time()
