"""Scenarios of `twin validate`: one engine, live and simulated, at several loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, field_validator, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.paths import FilePath
from scenarios.engine import EngineSpec
from scenarios.limits import PositiveTokens, Probes, Repeats, Threads
from scenarios.overload import check_fixed
from scenarios.overrides import Settings
from scenarios.reading import ScenarioFile, check
from scenarios.steps import SpeculativeSpec
from scenarios.system import ColocatedSpec, DisaggregatedSpec, FrontendSpec
from workloads.errors import BadInput

ClockName = Literal["wall", "direct"]
Load = Annotated[float, Field(gt=0, lt=1)]


def _without_pauses(workload: dict[str, Any]) -> dict[str, Any]:
    """A workload whose users do not think, and whose tools take no time."""
    sessions = workload.get("sessions")
    if not isinstance(sessions, dict):
        return workload
    changed = sessions | {"think": {"mean": 0.0}}
    if isinstance(tools := sessions.get("tools"), dict):
        changed["tools"] = tools | {"pause": {"mean": 0.0}}
    return workload | {"sessions": changed}


def _with_layout(system: object) -> object:
    """A section that names no layout is colocated."""
    return {"layout": "colocated", **system} if isinstance(system, dict) and "layout" not in system else system


class QuantiseSpec(Strict):
    """Linear layers rounded to nearest when the model is loaded.

    Attributes:
        group: inputs that share a scale; -1 for a whole row. symmetric: without zero points.
    """

    bits: Literal[3, 4] = 4
    group: Literal[-1, 128] = 128
    symmetric: bool = True


class LiveModelSpec(Strict):
    """The live model.

    Attributes:
        path: a Hugging Face directory; or, with `weights: random`, a config.json.
        threads: CPU threads that one operation may use. Threads that other programs delay make step times vary.
    """

    path: FilePath
    weights: Literal["loaded", "random"] = "loaded"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Threads = 1
    quantise: QuantiseSpec | None = None


class ProfilingSpec(Strict):
    """The profiling of the engine, which takes place without a calibration.

    Attributes:
        rounds: number of rounds; every fifth is held out for evaluation.
        max_steps, max_prompt_tokens, max_output_tokens: limits within a round.
        resent: the share of requests whose prompts repeat the beginning of an earlier one, for workloads whose prompts
            do.
        answers: with speculative decoding, answers to other requests of the workload, from which it is found what is
            drafted and how much of it is right.
        in_turns: of several engines, profile them in turns with each replay, too, some milliseconds at a time, and
            predict by that.
    """

    rounds: Probes = Field(default=150, ge=10)
    max_steps: Probes = Field(default=100, ge=10)
    max_prompt_tokens: PositiveTokens
    max_output_tokens: PositiveTokens
    resent: float = Field(default=0.0, ge=0, le=1)
    answers: Probes = 100
    in_turns: bool = False


class MachineSpeedSpec(Strict):
    """The readings of the machine's speed.

    Attributes:
        share: largest share of the time that speed probes take; there is at most one reading a step.
    """

    share: float = Field(default=0.2, gt=0, le=0.5)


class ValidationScenario(ScenarioFile):
    """A workload and one or several engines, which are run live and simulated.

    Attributes:
        workload, engine: as in a scenario of kind serving; the arrivals have no rate, since `loads` give it.
            `workload.requests` is the number at a load of 1; lower loads have fewer, so that all take equally long.
        system: as in a scenario of kind serving: one engine, or prefill and decode engines (`layout: disaggregated`)
            for one model or several.
        loads: requests per second, or sessions per second, relative to the predicted capacity: what the engine serves
            if `max_concurrency` clients, who do not think, always have a request.
        repeats: of each load, with other requests each time.
        clock: of the live runs: `wall` time, or `direct`: the CPU time of the run's own computation, which arrivals do
            not wait for; None: as `on_device` says.
        machine_speed: reads the machine's speed between steps, for errors corrected by it; `off`: it is not read.
        calibration: a file of engine steps of an earlier validation; without one the engine is profiled.
    """

    kind: Literal["validation"]
    model: LiveModelSpec
    workload: dict[str, Any]
    engine: EngineSpec
    system: Annotated[
        ColocatedSpec | DisaggregatedSpec, Field(discriminator="layout"), BeforeValidator(_with_layout)
    ] = Field(default_factory=ColocatedSpec)
    loads: list[Load] = Field(min_length=1, max_length=1000)
    repeats: Repeats = Field(default=3, ge=2)
    profiling: ProfilingSpec
    clock: ClockName | None = None
    machine_speed: MachineSpeedSpec | None = None
    calibration: FilePath | None = None
    slo: dict[Literal["ttft", "tpot", "e2e"], PositiveFloat] = Field(default_factory=dict)

    @field_validator("machine_speed", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        """Read `on` as the defaults, and `off` as nothing."""
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _no_rate(self) -> ValidationScenario:
        arrivals = self.workload.get("arrivals")
        if not isinstance(arrivals, dict) or arrivals.get("process") not in ("poisson", "gamma", "deterministic"):
            raise BadInput("expected a process that takes a rate", field="workload.arrivals", value=arrivals)
        if self.workload.get("sessions"):
            self._check_sessions()
        if "rate" in arrivals:
            raise BadInput("expected none, since loads give it", field="workload.arrivals.rate", value=arrivals["rate"])
        if self.engine.speculative_config is not None:
            self._check_speculation(self.engine.speculative_config)
        if self.engine.pipeline_parallel_size > 1:
            expected = "expected 1: a live engine has all layers on one device"
            raise BadInput(expected, field="engine.pipeline_parallel_size", value=self.engine.pipeline_parallel_size)
        if self.engine.async_scheduling and self.machine_speed:
            expected = "expected off with engine.async_scheduling: no time is left between steps"
            raise BadInput(expected, field="machine_speed")
        return self

    def _check_sessions(self) -> None:
        if isinstance(self.system, DisaggregatedSpec):
            raise BadInput("expected none with layout: disaggregated", field="workload.sessions")
        if self.engine.speculative_config is not None:
            expected = "expected none with engine.speculative_config: drafts are measured in single answers"
            raise BadInput(expected, field="workload.sessions")

    def _check_speculation(self, spec: SpeculativeSpec) -> None:
        field = "engine.speculative_config"
        if spec.method != "ngram":
            expected = "expected ngram: the live engine has no draft model"
            raise BadInput(expected, field=f"{field}.method", value=spec.method)
        if spec.states_acceptance or spec.acceptance_profile is not None:
            raise BadInput("expected no acceptance and no proposed: they are measured", field=field)
        if isinstance(self.system, DisaggregatedSpec):
            raise BadInput("expected none with layout: disaggregated", field=field)

    @model_validator(mode="after")
    def _one_engine(self) -> ValidationScenario:
        check_fixed(self.system.autoscaling, "live engines are neither started nor stopped")
        if self.system.frontend != FrontendSpec():
            raise BadInput("expected none: it is measured, or part of the steps", field="system.frontend")
        if isinstance(self.system, DisaggregatedSpec):
            return self._several_engines()
        if self.profiling.in_turns:
            raise BadInput("expected false with one engine", field="profiling.in_turns", value=True)
        models = self.workload.get("models")
        engines = {
            "engine.data_parallel_size": self.engine.data_parallel_size,
            "system.replicas": self.system.replicas,
            "workload.models.count": models.get("count") if isinstance(models, dict) else 1,
        }
        for field, value in engines.items():
            if isinstance(value, int) and value > 1:
                raise BadInput("expected 1: the live engine is alone", field=field, value=value)
        return self

    def _several_engines(self) -> ValidationScenario:
        """Refuse what several live engines do not have: they are run by direct execution."""
        assert isinstance(self.system, DisaggregatedSpec)
        refused = {
            "machine_speed": self.machine_speed is not None,
            "system.decode_step_time": self.system.decode_step_time is not None,
            "system.link.shared": self.system.link.shared,
        }
        for field, is_refused in refused.items():
            if is_refused:
                raise BadInput("expected none with layout: disaggregated", field=field)
        return self

    @property
    def max_concurrency(self) -> int:
        """Sequences that all decode engines run at once."""
        system, models = self.system, self.workload.get("models")
        engines = 1
        if isinstance(system, DisaggregatedSpec):
            copies = models.get("count", 1) if isinstance(models, dict) and system.decode == "isolated" else 1
            engines = system.decode_replicas * copies
        return self.engine.max_num_seqs * engines

    def on_device(self, device: Literal["cpu", "cuda"]) -> ValidationScenario:
        """This scenario with its clock chosen: unless it says so, `direct` on one CPU thread, else `wall`.

        Reading the machine's speed takes the wall clock, since its probes are timed by it.
        """
        if self.machine_speed and device != "cpu":
            raise BadInput("expected off with --backend cuda: the speed of a GPU is not read", field="machine_speed")
        single = device == "cpu" and self.model.threads == 1
        if isinstance(self.system, DisaggregatedSpec) and (not single or self.clock == "wall"):
            expected = "expected clock: direct, model.threads: 1 and --backend cpu"
            raise BadInput(expected, field="system.layout", value="disaggregated")
        clock = self.clock or ("direct" if single and self.machine_speed is None else "wall")
        if clock == "direct" and not single:
            expected = (
                "expected wall with --backend cuda or several model.threads: the CPU time of one thread is not all"
            )
            raise BadInput(expected, field="clock", value=clock)
        if clock == "direct" and self.machine_speed:
            raise BadInput("expected off with clock: direct, or clock: wall", field="machine_speed")
        return self.model_copy(update={"clock": clock})

    def serving(
        self, calibration: Path, rate: float | None, frontend: Mapping[str, float], drafts: Path | None = None
    ) -> dict[str, Any]:
        """The scenario of kind serving at a rate; without one, `max_concurrency` clients that always have a request.

        Args:
            frontend: fields of `system.frontend`, of several engines.
            drafts: measured outcomes of drafts, of an engine that speculates.
        """
        step_time = {"source": "engine_regression", "path": str(calibration.resolve())}
        scenario = self._serving(step_time, rate)
        if frontend and isinstance(self.system, DisaggregatedSpec):
            scenario["system"]["frontend"] = dict(frontend)
        if drafts is not None:
            scenario["engine"]["speculative_config"]["acceptance_profile"] = str(drafts.resolve())
        return scenario

    def serving_without_times(self) -> dict[str, Any]:
        """The scenario of kind serving for a live backend, which needs no step times."""
        return self._serving({"source": "linear", "overhead": 1.0, "per_token": 0.0}, None)

    def _serving(self, step_time: dict[str, Any], rate: float | None) -> dict[str, Any]:
        arrivals, workload = dict(self.workload["arrivals"]) | {"rate": rate}, self.workload
        if rate is None:
            arrivals = {"process": "closed_loop", "concurrency": self.max_concurrency}
            workload = _without_pauses(workload)
        return {
            "schema": self.schema_,
            "kind": "serving",
            "name": self.name,
            "plugins": self.plugins,
            "seed": self.seed,
            "workload": workload | {"arrivals": arrivals},
            "engine": self.engine.model_dump(mode="json", by_alias=True),
            "system": self.system.model_dump(mode="json"),
            "step_time": step_time,
            "measure": {"slo": self.slo},
        }


def check_validation(document: dict[str, Any], settings: Settings, path: Path) -> ValidationScenario:
    """Apply `settings` to a document, and check it."""
    return check(ValidationScenario, document, settings, path)
