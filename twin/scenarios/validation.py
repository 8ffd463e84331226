"""Scenarios of `twin validate`: one system on both plants, at several loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from latency_models.strict import Strict, checked
from reports.records.run_directory import fingerprint
from twin.scenarios.overrides import Settings, apply
from workloads.errors import BadInput

Load = Annotated[float, Field(gt=0, lt=1)]


class QuantiseSpec(Strict):
    """Linear layers rounded to nearest when the model is loaded.

    Attributes:
        group: inputs that share a scale; -1 for a whole row. symmetric: without zero points.
    """

    bits: Literal[3, 4] = 4
    group: Literal[-1, 128] = 128
    symmetric: bool = True


class LiveModelSpec(Strict):
    """The model that is run.

    Attributes:
        path: a Hugging Face directory; or, with `weights: random`, a config.json.
        threads: of the CPU that one operation may use. More than the machine has to itself makes steps erratic.
    """

    path: str
    weights: Literal["loaded", "random"] = "loaded"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: PositiveInt = 1
    quantise: QuantiseSpec | None = None


class ProbeSpec(Strict):
    """How the engine is probed where no calibration is given.

    Attributes:
        rounds: how many; a fifth of them is held out. steps: of a round at most.
        prompt, answer: tokens at most.
        pace_share: of all time, that goes to reading the machine's pace between steps at most, one reading a step; 0:
            it is taken to hold still. Default 0.2; 0 with `engine.async_scheduling`, where a step is always under way.
    """

    rounds: int = Field(default=150, ge=10)
    steps: int = Field(default=100, ge=10)
    prompt: PositiveInt
    answer: PositiveInt
    pace_share: float | None = Field(default=None, ge=0, le=0.5)


class ValidationScenario(Strict):
    """What is played live, and predicted.

    Attributes:
        workload, engine: as in a scenario of kind serving; the arrivals' rate is left out, since `loads` give it.
            `workload.requests` are those of a load of 1: lower loads have fewer, and all take equally long.
        loads: requests a second over what the twin finds the system can do.
        repeats: of each load, with other requests each time.
        calibration: a file of engine steps, as an earlier validation wrote it; without one the engine is probed.
    """

    schema_: Literal["twin.scenario/1"] = Field(alias="schema")
    kind: Literal["validation"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    seed: int = Field(default=0, ge=0)
    model: LiveModelSpec
    workload: dict[str, Any]
    engine: dict[str, Any]
    loads: list[Load] = Field(min_length=1)
    repeats: int = Field(default=3, ge=2)
    probe: ProbeSpec
    calibration: str | None = None
    slo: dict[Literal["ttft", "tpot", "e2e"], PositiveFloat] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_rate(self) -> ValidationScenario:
        arrivals = self.workload.get("arrivals")
        if not isinstance(arrivals, dict) or arrivals.get("process") not in ("poisson", "gamma", "deterministic"):
            raise BadInput("expected a process that takes a rate", field="workload.arrivals", value=arrivals)
        if self.engine.get("data_parallel"):
            raise BadInput("expected none: the live engine is alone", field="engine.data_parallel")
        if "rate" in arrivals:
            raise BadInput("expected none, since loads give it", field="workload.arrivals.rate", value=arrivals["rate"])
        if self.engine.get("async_scheduling") and self.probe.pace_share:
            expected = "expected 0 with engine.async_scheduling: there is no time between steps"
            raise BadInput(expected, field="probe.pace_share", value=self.probe.pace_share)
        return self

    @property
    def pace_share(self) -> float:
        """Of all time, that goes to reading the machine's pace."""
        if self.probe.pace_share is not None:
            return self.probe.pace_share
        return 0.0 if self.engine.get("async_scheduling") else 0.2

    def fingerprint(self, *besides: str) -> str:
        """Changes with the scenario and with what else its result depends on."""
        return fingerprint([self.model_dump(mode="json"), *besides])

    def serving(self, calibration: Path, rate: float | None) -> dict[str, Any]:
        """The scenario of kind serving at a rate; without one, as many clients as there are seats, never idle."""
        arrivals = dict(self.workload["arrivals"]) | {"rate": rate}
        if rate is None:
            seats = self.engine.get("max_num_seqs", 256)
            arrivals = {"process": "closed_loop", "concurrency": seats}
        return {
            "schema": self.schema_,
            "kind": "serving",
            "name": self.name,
            "seed": self.seed,
            "workload": self.workload | {"arrivals": arrivals},
            "engine": self.engine,
            "step_time": {"source": "engine_steps", "path": str(calibration.resolve())},
            "measure": {"slo": self.slo},
        }


def check_validation(document: dict[str, Any], settings: Settings, path: Path) -> ValidationScenario:
    """The document with `settings` applied, checked.

    Raises:
        BadInput: naming the file, the field, the value and what was expected.
    """
    return checked(ValidationScenario, apply(document, settings), path)
