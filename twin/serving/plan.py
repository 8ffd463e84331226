"""From a checked scenario to what a run needs: everything that can be wrong has been found by then."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latency_models.step_time import StepTime
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from twin.scenarios.serving import DisaggregatedSpec, ServingScenario
from twin.scenarios.step_time import KernelTablesSpec
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.traces import Trace


@dataclass(frozen=True)
class ServingPlan:
    """A run to be made.

    Attributes:
        trace_digest: identifies the trace's content; None without one.
    """

    scenario: ServingScenario
    base: Path
    workload: Workload
    requests: int
    config: EngineConfig
    step_time: StepTime
    decode_step_time: StepTime
    trace_name: str | None
    trace_digest: str | None

    def chunks(self) -> ChunkPolicy | None:
        """A chunk policy of an engine's own."""
        spec = self.scenario.engine.chunking
        return spec.build(self.step_time) if spec else None


def make_plan(scenario: ServingScenario, base: Path, trace: Trace | None) -> ServingPlan:
    """Build what the scenario names; relative paths start from `base`.

    Raises:
        BadInput: naming the field and the value of what cannot be used.
    """
    workload = scenario.workload.build(trace)
    config = scenario.engine.build(base, workload.prefix_block_tokens)
    step_time = scenario.step_time.build(base)
    system = scenario.system
    decode = system.decode_step_time if isinstance(system, DisaggregatedSpec) else None
    requests = scenario.workload.count(trace)
    if workload.recorded is not None and requests > workload.recorded:
        expected = f"expected at most the {workload.recorded} that the trace has"
        raise BadInput(expected, field="workload.requests", value=requests)
    plan = ServingPlan(
        scenario, base, workload, requests, config, step_time, decode.build(base) if decode else step_time,
        trace.name if trace else None, _digest(trace) if trace else None,
    )  # fmt: skip
    plan.chunks()
    _check_failures(plan)
    _check_ranks(scenario)
    return plan


def _digest(trace: Trace) -> str:
    """Changes with the content of the trace, wherever it lies."""
    content = hashlib.sha256(trace.prefill_tokens.tobytes() + trace.decode_tokens.tobytes())
    if trace.arrivals is not None:
        content.update(trace.arrivals.tobytes())
    if trace.prefix_blocks is not None:
        content.update(repr(trace.prefix_blocks).encode())
    return content.hexdigest()


def engine_names(scenario: ServingScenario) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Names of the engines that serve each model: first (prefill or all of it), and then (decode; empty if colocated).

    Models that share a pool have the same list.
    """
    models = scenario.workload.models.names if scenario.workload.models.count > 1 else ["default"]
    several = len(models) > 1
    system = scenario.system

    def named(kind: str, model: str, count: int) -> list[str]:
        return [f"{model}/{kind}-{i}" if several else f"{kind}-{i}" for i in range(count)]

    if not isinstance(system, DisaggregatedSpec):
        return {model: named("engine", model, system.replicas) for model in models}, {}
    front = {model: named("prefill", model, system.prefill_replicas) for model in models}
    if system.decode == "shared":
        pool = [f"decode-{i}" for i in range(system.decode_replicas)]
        return front, dict.fromkeys(models, pool)
    return front, {model: named("decode", model, system.decode_replicas) for model in models}


def _check_ranks(scenario: ServingScenario) -> None:
    """Ranks that share experts are told to the scheduler and to the step times, and must be as many."""
    spec, ranks = scenario.step_time, scenario.engine.data_parallel
    if isinstance(spec, KernelTablesSpec) and spec.data_parallel != ranks:
        expected = f"expected engine.data_parallel ({ranks}): ranks that step together"
        raise BadInput(expected, field="step_time.data_parallel", value=spec.data_parallel)


def _check_failures(plan: ServingPlan) -> None:
    front, back = engine_names(plan.scenario)
    names = [name for pool in (*front.values(), *back.values()) for name in pool]
    for i, failure in enumerate(plan.scenario.failures):
        if failure.engine not in names:
            expected = f"expected one of {', '.join(dict.fromkeys(names))}"
            raise BadInput(expected, field=f"failures.{i}.engine", value=failure.engine)


def describe(plan: ServingPlan) -> dict[str, Any]:
    """What a manifest and a document say of the plan."""
    return {
        "scenario": plan.scenario.model_dump(mode="json", by_alias=True),
        "requests": plan.requests,
        "kv_blocks": plan.config.kv_blocks,
        "step_time": plan.scenario.step_time.provenance(),
        "trace": plan.trace_name,
    }
