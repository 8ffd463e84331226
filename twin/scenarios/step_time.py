"""The `step_time` section of a serving scenario: where the durations of steps come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.ec_tables import EcTables, LayerTables, Passes, Selection, read_layer_tables
from latency_models.kernel_tables.parallel import KernelTableSettings
from latency_models.step_time import LinearStepTime, StepTime
from latency_models.strict import Strict, read_yaml


class LinearSpec(Strict):
    """Seconds: `overhead` a step, `per_token` a row, `per_kv_token` a cached token that a decode attends to,
    `per_prefill_kv_token` a cached token that a prompt token attends to.
    """

    source: Literal["linear"]
    overhead: NonNegativeFloat
    per_token: NonNegativeFloat = 0.0
    per_kv_token: NonNegativeFloat = 0.0
    per_prefill_kv_token: NonNegativeFloat = 0.0

    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`."""
        return LinearStepTime(self.overhead, self.per_token, self.per_kv_token, self.per_prefill_kv_token)

    def provenance(self) -> dict[str, Any]:
        """What a document says of it."""
        return {"source": "linear", "note": "coefficients stated in the scenario"}


class KernelTablesSpec(KernelTableSettings):
    """Kernel microbenchmarks: `path` is a profiler's folder, or the file that `twin calibrate import` made of it."""

    source: Literal["kernel_tables"]
    path: str

    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`.

        Raises:
            BadInput: tables or a model file that cannot be used.
        """
        from latency_models.kernel_tables.step_time import load_kernel_tables

        settings = KernelTableSettings(**self.model_dump(exclude={"source", "path"}))
        return load_kernel_tables(Path(self.path), settings, base=base)

    def provenance(self) -> dict[str, Any]:
        """What a document says of it."""
        return {"source": "kernel_tables", "path": self.path, "model": self.model}


class MeasuredStepsSpec(Strict):
    """A regression on measured engine steps (`path`): the first `share` of each experiment teaches it."""

    source: Literal["measured_steps"]
    path: str
    share: float = Field(default=0.5, gt=0, le=1)

    def build(self, base: Path) -> StepTime:
        """The fitted model, with a covariance to draw from; relative paths start from `base`.

        Raises:
            BadInput: steps that cannot be read, or from which nothing can be fitted.
        """
        from latency_models.measured_steps import StepRegression, read_measured_steps

        taught, _ = read_measured_steps(base / self.path).split(self.share)
        return StepRegression().fit(taught)

    def provenance(self) -> dict[str, Any]:
        """What a document says of it."""
        return {"source": "measured_steps", "path": self.path, "share": self.share}


class EngineStepsSpec(Strict):
    """A regression on timed steps of the very engine that is to be predicted: `path` is the file that `twin validate`
    writes.
    """

    source: Literal["engine_steps"]
    path: str

    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`.

        Raises:
            BadInput: a file that cannot be read or breaks its schema.
        """
        from latency_models.engine_steps import read_engine_steps

        return read_engine_steps(base / self.path)

    def provenance(self) -> dict[str, Any]:
        """What a document says of it."""
        return {"source": "engine_steps", "path": self.path}


class AiconfiguratorSpec(Strict):
    """Kernels of one model from aiconfigurator's tables: `path` is the file that `twin calibrate import` made.

    Attributes:
        decode, prefill: factors on the kernels of decodes, and on what prompts add. prompt_step: seconds that a step
            with prompts takes more. per_sequence: seconds of the host for each decode. What closed-loop rows teach of
            them: `latency_models.aiconfigurator.regression`.
    """

    source: Literal["aiconfigurator"]
    path: str
    decode: PositiveFloat = 1.0
    prefill: PositiveFloat = 1.0
    prompt_step: NonNegativeFloat = 0.0
    per_sequence: NonNegativeFloat = 0.0

    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`.

        Raises:
            BadInput: a file that cannot be read or is of another schema.
        """
        from latency_models.aiconfigurator.kernels import ModelKernels
        from latency_models.aiconfigurator.step_time import AiconfiguratorStepTime, Corrections

        kernels = ModelKernels.from_document(read_yaml(base / self.path))
        return AiconfiguratorStepTime(kernels, Corrections(**self.model_dump(exclude={"source", "path"})))

    def provenance(self) -> dict[str, Any]:
        """What a document says of it."""
        return {"source": "aiconfigurator", "path": self.path}


class EcTablesSpec(Strict):
    """A 4-bit model with error compensators (SPEAR 4.3): `tables`, in the scenario or in the file at `path`.

    `selection` says which modules carry one; `passes` and `pad_to` as for `latency_models.ec_tables.EcTables`.
    """

    source: Literal["ec_tables"]
    path: str | None = None
    tables: LayerTables | None = None
    selection: Selection
    passes: Passes = "separate"
    pad_to: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_source(self) -> EcTablesSpec:
        if (self.path is None) == (self.tables is None):
            raise ValueError("expected either path or tables")
        return self

    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`.

        Raises:
            BadInput: tables that cannot be read, or a selection of layers that are not there.
        """
        tables = self.tables
        if tables is None:
            assert self.path is not None
            tables = read_layer_tables(base / self.path)
        return EcTables(tables, self.selection, self.passes, self.pad_to)

    def provenance(self) -> dict[str, Any]:
        """What a document says of it."""
        told = {"path": self.path} if self.tables is None else {"note": self.tables.source}
        return {"source": "ec_tables", **told}


class CalibrationSpec(Strict):
    """What `twin calibrate run` measured: the file at `path`."""

    source: Literal["calibration"]
    path: str

    def build(self, base: Path) -> StepTime:
        """The model; relative paths start from `base`.

        Raises:
            BadInput: a file that cannot be read, or that holds no tables.
        """
        from latency_models.measured_calibration import read_measured_calibration

        return read_measured_calibration(base / self.path).step_time()

    def provenance(self) -> dict[str, Any]:
        """What a document says of it."""
        return {"source": "calibration", "path": self.path}


StepTimeSpec = Annotated[
    LinearSpec
    | KernelTablesSpec
    | MeasuredStepsSpec
    | EngineStepsSpec
    | AiconfiguratorSpec
    | EcTablesSpec
    | CalibrationSpec,
    Field(discriminator="source"),
]
