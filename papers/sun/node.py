"""The paper's testbed (appendix A.2) as a scenario: four models on one DGX A100, prefill and decode apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from papers.data import scenario as read_scenario
from papers.sun.concurrency import DEVICE
from papers.sun.decode import fit_decode, fit_prompts, rows_of
from papers.sun.published import Placement, concurrency_rows
from scenarios.serving import MeasureSpec
from twin.serving.results.run import Run
from twin.serving.results.summary import RequestLatencies, summarise
from twin.sweeps.one_run import run_plan
from twin.sweeps.serving_sweep import prepare

MODEL, MODEL_FILE, BITS = "LLaMA3.1-8B", "llama-3.1-8b", 16
MODELS = 4
PROMPT = 1024
"""Prompt tokens: A.2's only example and Table 4's minimum. Our text of section 4.3 lacks its number."""

LARGEST_BATCH = 256
"""Sequences of a decode worker: vLLM's default on an A100 (1024 on newer devices); the paper states none. The fitted
line may be a little fast so far up, for the ridge lies at 153 rows."""

STEP_BUDGET = 2048
"""Tokens of a step: the default of vLLM's server on an A100."""

CACHE_BYTES = 2.0
"""Bytes of one KV element, for any bits of the weights."""

GRACE, WINDOW = 30.0, 60.0
"""Grace period and measured window, seconds (appendix A.2)."""


@dataclass(frozen=True)
class Service:
    """Seconds of a prefill step and of each of its tokens, of a decode step and of each KV token that it reads."""

    prompt_overhead: float
    prompt_token: float
    step: float
    kv_token: float

    def prompts_a_second(self, tokens: int) -> float:
        """Most prompts that one prefill worker computes in a second, with its budget full."""
        together = STEP_BUDGET // tokens
        return together / (self.prompt_overhead + self.prompt_token * together * tokens)


@dataclass(frozen=True)
class Load:
    """The offered load. `rate`: requests a second, all models together; `zipf`: skew over models; tokens; seconds."""

    rate: float
    answer: int
    zipf: float = 0.0
    grace: float = GRACE
    window: float = WINDOW


@dataclass(frozen=True)
class Outcome:
    """One run's window: output tokens a second, mean TPOT and TTFT, mean 1/TPOT, answered over offered requests."""

    throughput: float
    tpot: float
    ttft: float
    interactivity: float
    achieved: float


def fitted_service() -> Service:
    """Service times from Table 4's rows of the model that section 4.3 serves, 16-bit weights, concurrency 1 and 4."""
    rows = rows_of(concurrency_rows(), MODEL)
    fit, prompts = fit_decode(rows), fit_prompts(rows)[BITS]
    return Service(prompts.beta_, prompts.alpha_, fit.overhead(BITS, several=True), fit.per_kv_token)


def scenario(service: Service, load: Load, placement: Placement, workers: int = MODELS) -> dict[str, Any]:
    """A scenario document; `workers` are decode workers in all."""
    hardware, model = load_hardware(DEVICE), load_model(MODEL_FILE)
    until = load.grace + load.window
    expected = load.rate * until
    document = read_scenario("sun", "node") | {"name": f"sun-{placement}"}
    workload, system = document["workload"], document["system"]
    # So many that they practically never run out before the window ends.
    workload["requests"] = math.ceil(expected + 4 * math.sqrt(expected))
    workload["decode"]["mean"] = load.answer
    workload["arrivals"]["rate"] = load.rate
    workload["models"]["zipf"] = load.zipf
    document["engine"]["kv_memory"]["memory"] = hardware.memory_capacity
    document["step_time"] |= {"overhead": service.prompt_overhead, "per_token": service.prompt_token}
    system["decode"] = placement
    system["decode_replicas"] = workers if placement == "shared" else workers // MODELS
    system["link"] = {
        "bandwidth": hardware.network.intra_node,
        "bytes_per_token": model.kv_bytes_per_token(CACHE_BYTES),
    }
    system["decode_step_time"] |= {"overhead": service.step, "per_kv_token": service.kv_token}
    document["measure"] = {"after": load.grace, "before": until}
    return document


def outcomes(document: dict[str, Any], replications: int) -> list[Outcome]:
    """One run for each realisation of the arrivals; run k of two scenarios of one load gets the same requests."""
    tasks = prepare(document, Path(document["name"]), replications=replications).tasks
    return [_outcome(run_plan(task.plan, task.replication), task.plan.scenario.measure, document) for task in tasks]


def _outcome(run: Run, measure: MeasureSpec, document: dict[str, Any]) -> Outcome:
    summary, samples = summarise(run, measure), RequestLatencies(run.columns, measure).counted()
    return Outcome(
        throughput=summary["output_throughput"],
        tpot=summary["tpot"]["mean"],
        ttft=summary["ttft"]["mean"],
        interactivity=float(np.mean(1 / samples["tpot"])),
        achieved=summary["request_throughput"] / document["workload"]["arrivals"]["rate"],
    )
