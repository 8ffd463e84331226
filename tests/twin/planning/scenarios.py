"""Small questions for tests: engines with linear step times that are simulated in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from twin.executors.executor import Processes
from twin.planning.engine_estimates import EngineEstimate
from twin.planning.planner import Planner
from twin.planning.question import Lengths, Question, read_question
from twin.planning.space import Candidate
from twin.planning.windows import Simulations
from twin.sweeps.serving_sweep import prepare

SMALL: dict[str, Any] = {
    "schema": "twin.scenario/1",
    "kind": "serving",
    "name": "small",
    "workload": {
        "prefill": {"distribution": "lognormal", "mean": 200, "cv": 1.0},
        "decode": {"distribution": "geometric", "mean": 16},
        "arrivals": {"process": "poisson", "rate": 40},
    },
    "engine": {"num_gpu_blocks": 2000, "max_num_seqs": 64, "enable_prefix_caching": False},
}


def kind(name: str, count: int, price: float, speed: float, **engine: Any) -> dict[str, Any]:
    """A kind of engine on `count` devices, `speed` times as fast as one device."""
    step = {"source": "linear", "overhead": 0.01 / speed, "per_token": 6e-5 / speed, "per_kv_token": 2e-7 / speed}
    device = {"type": "X", "count": count, "price_per_hour": price}
    return {"name": name, "device": device, "engine": engine, "step_time": step}


def document(**plan: Any) -> dict[str, Any]:
    """A scenario with a plan: two kinds of engines, together or apart, with two budgets of tokens a step."""
    section = {
        "goals": {"ttft_p99": "300ms", "tpot_p99": "40ms"},
        "layouts": ["colocated", "disaggregated"],
        "link": {"bandwidth": 1e10, "bytes_per_token": 1e5},
        "vary": {"max_num_batched_tokens": [256, 1024]},
        "engines": [kind("one", 1, 2.0, 1.0), kind("two", 2, 2.0, 1.8)],
        "replications": 4,
        "window": 300,
    }
    return {**deepcopy(SMALL), "plan": {**section, **plan}}  # tests change the parts of their documents


def question(scenario: dict[str, Any]) -> Question:
    """The question of a document in the current folder."""
    return read_question(scenario, {}, Path("scenario.yaml"))


def simulations(jobs: int = 1) -> Simulations:
    """Simulations that are saved nowhere."""
    return Simulations({}, lambda key, point: None, Processes(jobs))


def planner(
    scenario: dict[str, Any], *, brief: bool = True, jobs: int = 1, deployments: Sequence[Candidate] = ()
) -> Planner:
    """A planner whose windows are saved nowhere."""
    return Planner(question(scenario), simulations(jobs), brief=brief, given=deployments)


def plan(scenario: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The document of a plan."""
    return planner(scenario, **options).run().document()


def estimated(scenario: dict[str, Any], prompt: int, answer: int) -> EngineEstimate:
    """The estimate of a scenario's only kind of engine, of equal requests."""
    (pool,) = prepare(scenario, Path("s.yaml")).cases[0].plan.pools
    lengths, scheduler = Lengths(np.full(100, prompt), np.full(100, answer)), pool.scheduler
    replicas = pool.spec.engine.data_parallel_size
    return EngineEstimate(scheduler.config, pool.step_time, lengths, "both", scheduler.stages, replicas)


def uncertain(**changes: Any) -> Planner:
    """A planner of two kinds of engines, whose step times have a stated error."""
    engines = [kind("one", 1, 2.0, 1.0), kind("two", 2, 2.0, 1.8)]
    engines = [entry | {"step_time": entry["step_time"] | {"spread": 0.3}} for entry in engines]
    section = {"goals": {"tpot_p50": "12ms"}, "layouts": ["colocated"], "vary": {}, "engines": engines, "window": 300}
    scenario = document(**{**section, **changes})
    arrivals = {"process": "poisson", "rate": 100}
    return planner({**scenario, "workload": {**scenario["workload"], "arrivals": arrivals}})
