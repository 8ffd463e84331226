"""Prefix-led planning: one request computes a cold rubric while its peers wait a step (Prelude 3, "Waiting versus
batching"), against computing it for each of them, and against an engine that can share within a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.deployment.hardware import load_hardware
from latency_models.deployment.models import load_model
from papers.common import Task
from papers.common import scenario as read_scenario
from papers.prelude.engines import step_line
from papers.prelude.lifetimes import combined, mean_and_tail
from scenarios.reading import Settings
from schedulers.engine_core import EngineCore
from twin.serving.results.uncertainty import flatten
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

REPLICATIONS = 5

VARIANTS: dict[str, Settings] = {
    "led": {},
    "not led": {"engine.in_batch_prefix_caching": False},
    "shared within a step": {"engine.in_batch_prefix_caching": False, "engine.cache_blocks_on": "scheduled"},
    "no prefix cache": {"engine.in_batch_prefix_caching": False, "engine.enable_prefix_caching": False},
}
COLD_JOBS = (4, 16, 64, 256)
"""Requests of an evaluation job that come at once, with one rubric that is not cached yet."""

BLOCK_TOKENS = 16

ITEM_TOKENS = 128
"""Tokens that each request of such a job adds to the rubric."""


def simulate(variant: str, peers: int, replication: int, requests: int) -> dict[str, Any]:
    """One run of steady traffic, or of a cold job of `peers` requests (0: steady); TTFT in seconds, requests/s."""
    document = cold_job(peers) if peers else scenario()
    document["workload"]["requests"] = requests
    plan = prepare(document, Path("prelude-rubric"), [VARIANTS[variant]]).cases[0].plan
    simulation = Simulation(plan, replication)
    run, (engine,) = simulation.run(), simulation.system.engines
    core = engine.core
    assert isinstance(core, EngineCore)
    first, arrival = (np.array(getattr(run.columns, name)) for name in ("first_token", "arrival"))
    return {
        "computed_tokens": core.prefill_tokens,
        "cached_tokens": core.cached_tokens,
        "steps": run.logs[0].num_steps,
        "ttft": mean_and_tail(first - arrival),
        "requests_per_second": len(first) / run.end,
    }


def scenario() -> dict[str, Any]:
    """`rubric.yaml` with a roofline's step time."""
    document = read_scenario("prelude", "rubric")
    document["step_time"] |= step_line(load_model("qwen3-4b"), load_hardware("h200-sxm"))
    return document


def cold_tokens(peers: int, rubric: int, item: int, block: int, budget: int, has_leader: bool) -> int:
    """Prompt tokens computed for `peers` requests that wait together with one cold rubric: the closed form.

    Led, the first request computes the whole of its prompt and all others what full blocks of the rubric leave. Not
    led, every request that fits into the first step's `budget` computes the whole.
    """
    prompt = rubric + item
    spared = rubric // block * block
    first = 1 if has_leader else min(peers, budget // prompt)
    return first * prompt + (peers - first) * (prompt - spared)


def cold_job(peers: int) -> dict[str, Any]:
    """The scenario with one job of `peers` requests at once, and nothing else."""
    document = scenario()
    rubric = document["workload"]["prefixes"]["tokens"]
    document["engine"]["num_gpu_blocks"] = 20_000  # nothing is forgotten
    document["workload"] |= {
        "requests": peers,
        "tasks": [{"task": "score", "weight": 1, "prefill": {"distribution": "fixed", "mean": rubric + ITEM_TOKENS}}],
        "prefixes": {"groups": 1, "tokens": rubric, "block_tokens": BLOCK_TOKENS},
        "arrivals": {"process": "closed_loop", "concurrency": peers},
    }
    return document


def tasks(requests: int = 4000, replications: int = REPLICATIONS) -> list[Task]:
    steady = [(name, 0, replication, requests) for name in VARIANTS for replication in range(replications)]
    cold = [(name, peers, 0, peers) for peers in COLD_JOBS for name in VARIANTS]
    return [Task(f"shared rubrics, {arguments[0]}", simulate, arguments) for arguments in (*steady, *cold)]


def summarise_prefixes(results: Mapping[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """Steady traffic with 95 % intervals, led against others run by run; cold jobs beside the closed form."""
    runs = {name: [result for arguments, result in results.items() if arguments[:2] == (name, 0)] for name in VARIANTS}
    jobs = {
        peers: {variant: result for (variant, size, *_), result in results.items() if size == peers}
        for peers in COLD_JOBS
    }
    return {
        "scenario": scenario(),
        "steady": [{"variant": name, **combined(runs[name])} for name in VARIANTS],
        "led_over": [
            {"variant": name, **combined([_ratio(a, b) for a, b in zip(runs["led"], runs[name], strict=True)])}
            for name in VARIANTS
            if name != "led"
        ],
        "cold": [_cold(peers, job_runs) for peers, job_runs in jobs.items()],
    }


def _cold(peers: int, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    document = cold_job(peers)
    rubric, budget = document["workload"]["prefixes"]["tokens"], document["engine"]["one_shot"]["tokens"]
    return {
        "peers": peers,
        "expected": {
            name: cold_tokens(peers, rubric, ITEM_TOKENS, BLOCK_TOKENS, budget, has_leader)
            for name, has_leader in (("led", True), ("not led", False))
        },
        "runs": runs,
    }


def _ratio(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    denominators = flatten(second)
    return {name: value / below if value is not None and (below := denominators[name]) else None
            for name, value in flatten(first).items()}  # fmt: skip
