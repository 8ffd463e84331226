"""The calibration file: α and β of attention, FFN and communication, their units, and where they came from."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError, model_validator

from latency_models.strict import Strict, explain_validation, read_yaml
from workloads.errors import BadInput

Interval = Annotated[list[float], Field(min_length=2, max_length=2)]
COMPONENTS = ("attention", "ffn", "communication")


class FitReport(Strict):
    """How well a line holds: intervals at 95 %, R², median relative error on held-out points, sizes that were
    measured."""

    points: PositiveInt
    range: Interval
    alpha_interval: Interval
    beta_interval: Interval
    covariance: list[list[float]]
    r_squared: float
    heldout_median_error: float | None = None


class Line(Strict):
    """t = alpha·x + beta. Attention: x is the token load of an instance. FFN: requests at one FFN instance.

    Communication: x is the requests of one attention instance, t the round trip (eq. 2-4).
    """

    alpha: NonNegativeFloat
    beta: NonNegativeFloat
    alpha_unit: str
    beta_unit: str
    fit: FitReport | None = None

    def seconds(self, size: float) -> float:
        """The line at one size, in the calibration's time unit."""
        return self.alpha * size + self.beta


class Provenance(Strict):
    """Where the figures came from. `method` is how: measured here, published by others, or derived from a roofline."""

    method: Literal["measured", "published", "roofline"]
    source: str
    device: str
    model: str
    date: str | None = None
    commit: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    note: str = ""


class Calibration(Strict):
    """One calibration file.

    `scope` says what the lines describe: a whole decode step, or one transformer layer of `layers`.
    """

    schema_: Literal["twin.calibration/1"] = Field(alias="schema")
    name: str
    time_unit: Literal["seconds", "cycles"]
    scope: Literal["step", "layer"]
    layers: PositiveInt | None = None
    attention: Line
    ffn: Line
    communication: Line
    provenance: Provenance

    @model_validator(mode="after")
    def _units_agree(self) -> Calibration:
        if self.scope == "layer" and self.layers is None:
            raise ValueError("expected layers, the number that make a step, since scope is layer")
        for name in COMPONENTS:
            line: Line = getattr(self, name)
            if line.beta_unit != self.time_unit:
                raise ValueError(f"{name}.beta_unit: got {line.beta_unit!r}, expected {self.time_unit!r}")
            if not line.alpha_unit.startswith(f"{self.time_unit}/"):
                raise ValueError(f"{name}.alpha_unit: got {line.alpha_unit!r}, expected '{self.time_unit}/...'")
        return self

    def step_line(self, component: Literal["attention", "ffn", "communication"]) -> tuple[float, float]:
        """(α, β) of a whole decode step: a layer's, times the layers."""
        line: Line = getattr(self, component)
        times = 1 if self.scope == "step" else self.layers
        assert times is not None
        return line.alpha * times, line.beta * times

    def content_hash(self) -> str:
        """Changes with any field."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_yaml(self) -> str:
        """The file's text."""
        document = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def load_calibration(name: str, base: Path = Path()) -> Calibration:
    """A built-in calibration by its name, or a file; relative paths start from `base`.

    Raises:
        BadInput: neither, or a file that breaks the schema.
    """
    path = find_data("calibrations", name, base)
    try:
        return Calibration.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain_validation(error, path, Calibration) from None


def builtin_names(kind: str) -> list[str]:
    """Names of the built-in files of a kind: calibrations, hardware or models."""
    folder = files("latency_models") / "data" / kind
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def find_data(kind: str, name: str, base: Path) -> Path:
    """The file behind a built-in name or a path.

    Raises:
        BadInput: the name is not built in and does not look like a path.
    """
    if name in (names := builtin_names(kind)):
        return Path(str(files("latency_models") / "data" / kind / f"{name}.yaml"))
    if "/" in name or name.endswith((".yaml", ".yml")):
        return base / name
    raise BadInput(f"expected a file or one of {', '.join(names)}", field=kind, value=name)
