"""Validation scenarios, and the engines that they and a server run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from latency_models.io.config_io import Strict, print_note
from latency_models.io.files import FilePath
from latency_models.stages import MessageLink
from scenarios import fields
from scenarios.afd import Topology, WorkloadSpec, parse_ratios, ratio_text
from scenarios.engine import ONE_STAGE, EngineSpec, PoolSpec, SchedulerPlan, router_name
from scenarios.overload import AutoscalingSpec, check_fixed
from scenarios.reading import ScenarioFile, Settings, check
from scenarios.serving import ServingScenario, check_scenario
from scenarios.system import ColocatedSpec, DisaggregatedSpec, FrontendSpec
from schedulers.bundle_slots import REFILL_POLICIES
from workloads.errors import BadInput


def single_engine(document: dict[str, Any], settings: Settings, path: Path) -> SchedulerPlan:
    """The plan of the scheduler of a scenario's engine: the same in the simulator and in a live server.

    Files that the scenario names are read where the scheduler depends on them. A scenario with several engines or a
    `system.routing` causes one note on stderr, since a router has nothing to choose here.
    """
    scenario = check_scenario(document, settings, path)
    if len(pools := scenario.pools) > 1:
        expected = "expected one pool: a server runs one engine, which prefills and decodes"
        raise BadInput(f"{expected}; found {', '.join(pool.name for pool in pools)}", field="system", file=path)
    engine, base = pools[0].engine, path.parent
    _refuse_sections(engine, "engine", path, single=True)
    num_engines, system = pools[0].num_engines(scenario.workload.models.count), scenario.system
    if num_engines > 1 or "routing" in system.model_fields_set:
        name = router_name(system.routing)
        count = f"1 of the scenario's {num_engines} engines" if num_engines > 1 else "one engine"
        print_note(f"{path}: {count} is run, which gets every request: system.routing {name} chooses nothing")
    workload = scenario.workload.build(scenario.workload.read_trace(base))
    step_time = pools[0].step_time.build(base) if engine.needs_step_time else None
    return engine.build(base, workload.prefix_block_tokens, step_time)


def tensor_parallel_size(pool: PoolSpec) -> int:
    """The devices that share each layer of a pool's engines, as its step times or its memory say."""
    memory = pool.engine.kv_memory
    stated = 1 if memory is None else memory.tensor_parallel_size
    return max(stated, int(getattr(pool.step_time, "tensor_parallel", 1)))


def _refuse_sections(engine: EngineSpec, section: str, path: Path, *, single: bool) -> None:
    """Refuse what a live engine does not have; `single`: the server runs this engine alone, in its own process."""
    tiers, ranks, stages = engine.kv_offloading, engine.data_parallel_size, engine.pipeline_parallel_size
    policy, apart = fields.named(engine.scheduling_policy)[0], "live engines in processes of their own"
    fields.refuse_first([
        (is_refused, f"{section}.{field}", value, expected)
        for field, is_refused, value, expected in [
            ("data_parallel_size", ranks > 1, ranks, "expected 1: live engines have no data-parallel ranks"),
            ("async_scheduling", engine.async_scheduling and not single, True,
             f"expected false: {apart} schedule no step ahead"),
            ("pipeline_parallel_size", stages > 1, stages, ONE_STAGE),
            ("kv_offloading.disk", tiers is not None and tiers.disk is not None, None,
             "expected none: a live engine has a tier in host memory and none on disk"),
            ("admission_control", engine.admission_control is not None and not single, None,
             f"expected none: {apart} shed no requests"),
            ("scheduling_policy", policy in ("deadline", "fair") and not single, policy,
             f"expected another one: {apart} know no classes and tenants"),
            ("lora_config", engine.lora_config is not None, None,
             "expected none: a live engine is given adapters by --lora-modules, without a scenario"),
            ("weight_swapping", engine.weight_swapping is not None, None,
             "expected none: a live engine does not swap weights"),
            ("speculative_config", engine.speculative_config is not None and not single, None,
             f"expected none: {apart} do not speculate"),
        ]
    ], path)  # fmt: skip


@dataclass(frozen=True)
class EnginePool:
    """Engines that are alike: the pool in the scenario, and what each engine's scheduler is built from."""

    spec: PoolSpec
    scheduler: SchedulerPlan


def engine_pools(document: dict[str, Any], settings: Settings, path: Path) -> tuple[ServingScenario, list[EnginePool]]:
    """A scenario and its pools, those that prefill first."""
    scenario = check_scenario(document, settings, path)
    check_fixed(scenario.system.autoscaling, "live engines are neither started nor stopped", path)
    workload = scenario.workload.build(scenario.workload.read_trace(path.parent))
    pools = []
    for i, spec in enumerate(scenario.pools):
        _refuse_sections(spec.engine, scenario.system.section(i, "engine"), path, single=False)
        step_time = spec.step_time.build(path.parent) if spec.engine.needs_step_time else None
        pools.append(EnginePool(spec, spec.engine.build(path.parent, workload.prefix_block_tokens, step_time)))
    first = pools[0].scheduler.config
    for pool in pools:
        config = pool.scheduler.config
        if (config.block_size, config.prefix_id_tokens) != (first.block_size, first.prefix_id_tokens):
            expected = f"expected {first.block_size}, as in pool {pools[0].spec.name}: caches are sent block by block"
            raise BadInput(expected, field="engine.block_size", value=config.block_size, file=path)
    return scenario, pools


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
    return {"layout": "colocated", **system} if isinstance(system, dict) and "layout" not in system else system


class QuantiseSpec(Strict):
    """Linear layers rounded to nearest when the model is loaded; `group`: inputs of one scale, -1 for a whole row."""

    bits: Literal[3, 4] = 4
    group: Literal[-1, 128] = 128
    symmetric: bool = True


class LiveModelSpec(Strict):
    """The live model: a Hugging Face directory, or with `weights: random` a config.json."""

    path: FilePath
    weights: Literal["loaded", "random"] = "loaded"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: fields.Threads = 1
    quantise: QuantiseSpec | None = None


class LiveEngineSpec(EngineSpec):
    """One engine that is run for real: `live`, this project's own, or `vllm`, the installed one."""

    backend: Literal["live", "vllm"] = "live"
    tensor_parallel_size: fields.Ranks = 1

    def refuse_in_vllm(self) -> None:
        """Refuse settings that vLLM does not have, by a `ValueError`."""
        only, policy = "expected none with engine.backend: vllm", fields.named(self.scheduling_policy)[0]
        fields.refuse_first([
            (self.tensor_parallel_size > 1, "engine.tensor_parallel_size", self.tensor_parallel_size,
             "expected 1 with engine.backend: vllm"),
            (policy not in ("fcfs", "priority"), "engine.scheduling_policy", policy, "expected fcfs or priority"),
            (self.kv_reservation == "max_tokens", "engine.kv_reservation", "max_tokens", "expected chunk or prompt"),
            (not self.scheduler.startswith("vllm"), "engine.scheduler", self.scheduler, "expected a version of vLLM"),
            *((bool(getattr(self, field)), f"engine.{field}", None, only) for field in NOT_IN_VLLM),
        ])  # fmt: skip


NOT_IN_VLLM = (
    "max_table_blocks", "in_batch_prefix_caching", "preemption_policy", "speculative_config", "kv_offloading",
    "lora_config", "weight_swapping", "admission_control", "max_prefill_tokens", "prefill_max_requests",
    "context_chunking_policy",
)  # fmt: skip
"""Settings of an engine that a validation of vLLM does not pass on."""


class ProfilingSpec(Strict):
    """The profiling of the engine, without a calibration; docs/reference/validation-scenario.md has every field."""

    rounds: fields.Probes = Field(default=150, ge=10)
    max_steps: fields.Probes = Field(default=100, ge=10)
    max_prompt_tokens: fields.PositiveTokens
    max_output_tokens: fields.PositiveTokens
    resent: float = Field(default=0.0, ge=0, le=1)
    answers: fields.Probes = 100
    in_turns: bool = False


class ValidationScenario(ScenarioFile):
    """A workload and engines, run live and simulated; docs/reference/validation-scenario.md has every field."""

    kind: Literal["validation"]
    model: LiveModelSpec
    workload: dict[str, Any]
    engine: LiveEngineSpec
    system: Annotated[
        ColocatedSpec | DisaggregatedSpec, Field(discriminator="layout"), BeforeValidator(_with_layout)
    ] = Field(default_factory=ColocatedSpec)
    loads: list[Load] = Field(min_length=1, max_length=1000)
    repeats: fields.Repeats = Field(default=3, ge=2)
    profiling: ProfilingSpec
    clock: ClockName | None = None
    calibration: FilePath | None = None
    slo: dict[Literal["ttft", "tpot", "e2e"], PositiveFloat] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _can_run_live(self) -> ValidationScenario:
        engine, system, drafts = self.engine, self.system, self.engine.speculative_config
        sessions, models, arrivals = (self.workload.get(name) for name in ("sessions", "models", "arrivals"))
        stated = arrivals if isinstance(arrivals, dict) else {}
        takes_rate = stated.get("process") in ("poisson", "gamma", "deterministic")
        apart = system if isinstance(system, DisaggregatedSpec) else None
        vllm, field = engine.backend == "vllm", "engine.speculative_config"
        several, alone = "expected none with layout: disaggregated", "expected 1: the live engine is alone"
        stages, devices = engine.pipeline_parallel_size, engine.tensor_parallel_size
        counts = {
            "engine.data_parallel_size": engine.data_parallel_size,
            "system.replicas": 1 if system.autoscaling else getattr(system, "replicas", 1),
            "workload.models.count": models.get("count") if isinstance(models, dict) else 1,
        }
        if vllm:
            engine.refuse_in_vllm()
        if system.autoscaling:
            _refuse_in_fleet(self, system.autoscaling)
        fields.refuse_first([
            (not takes_rate, "workload.arrivals", arrivals, "expected a process that takes a rate"),
            (sessions and apart, "workload.sessions", None, several),
            (sessions and drafts, "workload.sessions", None,
             "expected none with engine.speculative_config: drafts are measured in single answers"),
            ("rate" in stated, "workload.arrivals.rate", stated.get("rate"), "expected none, since loads give it"),
            (drafts and drafts.method != "ngram", f"{field}.method", drafts and drafts.method,
             "expected ngram: the live engine has no draft model"),
            (drafts and (drafts.states_acceptance or drafts.acceptance_profile is not None), field, None,
             "expected no acceptance and no proposed: they are measured"),
            (drafts and apart, field, None, several),
            (stages > 1, "engine.pipeline_parallel_size", stages, ONE_STAGE),
            (vllm and self.model.quantise, "model.quantise", None, "expected none with engine.backend: vllm"),
            (vllm and apart, "system.layout", "disaggregated", "expected colocated with engine.backend: vllm"),
            (system.frontend != FrontendSpec(), "system.frontend", None,
             "expected none: it is measured, or part of the steps"),
            (apart and devices > 1, "engine.tensor_parallel_size", devices, "expected 1 with layout: disaggregated"),
            (apart and apart.decode_step_time, "system.decode_step_time", None, several),
            (apart and apart.link.shared, "system.link.shared", None, several),
            *((not apart and isinstance(count, int) and count > 1, name, count, alone)
              for name, count in counts.items()),
        ])  # fmt: skip
        return self

    @property
    def fleet(self) -> AutoscalingSpec | None:
        """The autoscaling of engines that are really started and drained; None for engines that stay."""
        return (self.system.autoscaling or {}).get("engine")

    @property
    def attention_block(self) -> int:
        """Tokens to multiples of which the live engine's attention pads decodes; 0 where it pads none."""
        return 0 if self.engine.backend == "vllm" else self.engine.block_size

    @property
    def max_concurrency(self) -> int:
        """Sequences that all decode engines run at once."""
        system, models = self.system, self.workload.get("models")
        engines = 1 if self.fleet is None else self.fleet.max_replicas
        if isinstance(system, DisaggregatedSpec):
            copies = models.get("count", 1) if isinstance(models, dict) and system.decode == "isolated" else 1
            engines = system.decode_replicas * copies
        return self.engine.max_num_seqs * engines

    def on_device(self, device: Literal["cpu", "cuda"]) -> ValidationScenario:
        """This scenario with its clock chosen: unless it says so, `direct` on one CPU thread, else `wall`."""
        single = device == "cpu" and self.model.threads == 1
        clock = self.clock or ("direct" if single else "wall")
        in_pools = isinstance(self.system, DisaggregatedSpec)
        served = self.engine.backend == "vllm" and clock == "wall"  # by vLLM's server, in a process of its own
        fields.refuse_first([
            (in_pools and (not single or self.clock == "wall"), "system.layout", "disaggregated",
             "expected clock: direct, model.threads: 1 and --backend cpu"),
            (self.fleet is not None and (not single or self.clock == "wall"), "system.autoscaling", "engine",
             "expected clock: direct, model.threads: 1 and --backend cpu"),
            (clock == "direct" and not single, "clock", clock,
             "expected wall with --backend cuda or several model.threads: the CPU time of one thread is not all"),
            (self.profiling.in_turns and not single and not served, "profiling.in_turns", True,
             "expected false with --backend cuda or several model.threads"),
            (served and self.engine.chunking is not None, "engine.chunking", None,
             "expected none with engine.backend: vllm and clock: wall"),
        ])  # fmt: skip
        return self.model_copy(update={"clock": clock})

    def serving(
        self, calibration: Path, rate: float | None, frontend: Mapping[str, float], drafts: Path | None = None
    ) -> dict[str, Any]:
        """The scenario of kind serving at a rate; without one, `max_concurrency` clients that always have a request."""
        step_time = {"source": "engine_regression", "path": str(calibration.resolve())}
        scenario = self._serving(step_time, rate)
        if self.fleet is not None:
            scenario["system"] |= self._fleet_system(calibration, rate, frontend)
        elif frontend:
            scenario["system"]["frontend"] = dict(frontend)
        if drafts is not None:
            scenario["engine"]["speculative_config"]["acceptance_profile"] = str(drafts.resolve())
        return scenario

    def _fleet_system(self, calibration: Path, rate: float | None, frontend: Mapping[str, float]) -> dict[str, Any]:
        """The fleet with the measured time of a start; without a rate, the largest one."""
        assert self.fleet is not None
        if rate is None:
            return {"replicas": self.fleet.max_replicas, "autoscaling": None}
        if "start_up" not in frontend:
            raise BadInput("expected seconds: profile a fleet", file=calibration, field="frontend.start_up")
        spec = self.fleet.model_dump(mode="json")
        return {"autoscaling": {"engine": spec | {"start_up": spec["start_up"] | {"warm_up": frontend["start_up"]}}}}

    def serving_without_times(self) -> dict[str, Any]:
        """The scenario of kind serving for a live backend, before step times are known: without a chunk policy."""
        scenario = self._serving({"source": "linear", "overhead": 1.0, "per_token": 0.0}, None)
        return scenario | {"engine": scenario["engine"] | {"chunking": None}}

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
            "engine": self.engine.model_dump(mode="json", by_alias=True, exclude={"backend", "tensor_parallel_size"}),
            "system": self.system.model_dump(mode="json"),
            "step_time": step_time,
            "measure": {"slo": self.slo},
        }


def _refuse_in_fleet(scenario: ValidationScenario, autoscaling: Mapping[str, AutoscalingSpec]) -> None:
    engine, field = scenario.engine, "system.autoscaling.engine"
    spec, expected = autoscaling.get("engine"), "expected none with system.autoscaling"
    if spec is None or len(autoscaling) > 1 or isinstance(scenario.system, DisaggregatedSpec):
        raise BadInput("expected engine alone: a live fleet is colocated", field="system.autoscaling")
    measured = {name for name in spec.start_up.model_fields_set if getattr(spec.start_up, name)} - {"node", "image"}
    fields.refuse_first([
        (spec.goals is not None, f"{field}.policy", spec.policy, "expected a policy without goals: none is predicted"),
        (bool(measured), f"{field}.start_up", ", ".join(sorted(measured)), "expected node and image alone"),
        (not scenario.slo, "slo", None, "expected goals, whose share is compared"),
        (engine.backend == "vllm", "engine.backend", "vllm", "expected live with system.autoscaling"),
        (bool(scenario.workload.get("sessions")), "workload.sessions", None, expected),
        *((bool(getattr(engine, name)), f"engine.{name}", None, expected)
          for name in ("speculative_config", "async_scheduling")),
        (engine.tensor_parallel_size > 1, "engine.tensor_parallel_size", engine.tensor_parallel_size, "expected 1"),
    ])  # fmt: skip


def check_validation(document: dict[str, Any], settings: Settings, path: Path) -> ValidationScenario:
    """Apply `settings` to a document, and check it."""
    return check(ValidationScenario, document, settings, path)


class MessageLinkSpec(Strict):
    """The link between two roles (seconds, bytes/s, CPU seconds of a message), in direct execution and simulation."""

    latency: NonNegativeFloat = 0.0
    bandwidth: PositiveFloat = 1e9
    overhead: NonNegativeFloat = 0.0

    def build(self) -> MessageLink:
        return MessageLink(self.latency, self.bandwidth, self.overhead)


class BundleSystemSpec(Strict):
    """A bundle with one FFN instance, B sequences in each of m microbatches."""

    layout: Literal["afd"]
    batch_size: fields.Slots
    microbatches: fields.Microbatches = 2
    block_size: fields.PositiveTokens = 16
    refill: Annotated[str, fields.registered(REFILL_POLICIES)] = "fcfs"
    link: MessageLinkSpec = Field(default_factory=MessageLinkSpec)


class BundleProfilingSpec(Strict):
    """The profiling of the roles, at each ratio, in turns with the live runs."""

    max_prompt_tokens: fields.PositiveTokens
    max_output_tokens: fields.PositiveTokens


class BundleValidationScenario(ScenarioFile):
    """A bundle that is run live, with its slots full, and simulated; docs/reference/validation-scenario.md has every
    field.
    """

    kind: Literal["validation"]
    model: LiveModelSpec
    workload: WorkloadSpec
    system: BundleSystemSpec
    requests: fields.Requests
    ratio: Annotated[str, BeforeValidator(ratio_text)] = "1:8"
    repeats: fields.Repeats = Field(default=3, ge=2)
    profiling: BundleProfilingSpec
    clock: Literal["direct"] = "direct"

    @model_validator(mode="after")
    def _runnable(self) -> BundleValidationScenario:
        process, ratios = self.workload.arrivals.process, self.topologies
        fields.refuse_first([
            (process != "closed_loop", "workload.arrivals.process", None, "expected closed_loop"),
            (self.model.threads != 1, "model.threads", None, "expected 1: the CPU time of one thread is the clock"),
            (any(topology.ffn_instances > 1 for topology in ratios), "ratio", self.ratio,
             "expected whole ratios: one FFN instance"),
        ])  # fmt: skip
        return self

    def completions(self, instances: int) -> int:
        """Requests that a bundle with this many attention instances completes in each repeat."""
        return self.requests * instances

    @property
    def topologies(self) -> list[Topology]:
        """The bundles to run."""
        return parse_ratios(self.ratio)


def check_bundle_validation(document: dict[str, Any], settings: Settings, path: Path) -> BundleValidationScenario:
    """Apply `settings` to a document, and check it."""
    return check(BundleValidationScenario, document, settings, path)
