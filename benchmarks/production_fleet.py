"""Speed and memory of a simulated fleet with everything on, and what each part of it costs.

    python -m benchmarks.production_fleet [--requests 30000] [--all-parts] [--out FILE]

Four models have a pool of up to 16 engines each. Requests of three classes come with the rate of a day; a router looks
for cached prefixes, caches go on in host memory, engines speculate, and pools follow the load. With `--all-parts` the
same fleet is simulated again without speculation, then without tiers too, and so on. Goal: a million requests in 150 s
of one core and 2 GiB. Each simulation runs in a process of its own, whose peak memory is given.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from twin.serving.run.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

PARTS = ("speculation", "tiers", "prefix_aware", "autoscaling")
"""The parts that can be left out, in the order in which they are."""

SECONDS_A_REQUEST = 1 / 11.6
"""A million requests are a day."""


def scenario(requests: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """The fleet with some parts on."""

    def task(name: str, weight: float, prompt: float, answer: float) -> dict[str, Any]:
        lengths = {"prefill": (prompt, 1.0), "decode": (answer, 0.8)}
        distributions = {k: {"distribution": "lognormal", "mean": mean, "cv": cv} for k, (mean, cv) in lengths.items()}
        return {"task": "generate", "service_class": name, "weight": weight, **distributions}

    pools = [f"pool-{i}" for i in range(4)]
    engine: dict[str, Any] = {
        "num_gpu_blocks": 6000, "max_num_seqs": 64, "enable_prefix_caching": True, "scheduling_policy": "priority",
    }  # fmt: skip
    system: dict[str, Any] = {
        "pools": [
            {"name": name, "replicas": 8, "models": [f"model-{i}"], "role": "both"} for i, name in enumerate(pools)
        ]
    }
    if "speculation" in parts:
        engine["speculative_config"] = {"method": "draft_model", "num_speculative_tokens": 3, "acceptance": 0.7}
    if "tiers" in parts:
        engine["kv_offloading"] = {"bytes_per_token": 131072.0, "host": {"capacity": 64e9, "bandwidth": 25e9}}
    if "prefix_aware" in parts:
        system["routing"] = "prefix_aware"
    if "autoscaling" in parts:
        policy = {
            "policy": "target_utilization", "target": 0.6, "min_replicas": 4, "max_replicas": 16,
            "start_up": {"warm_up": 60},
        }  # fmt: skip
        system["autoscaling"] = dict.fromkeys(pools, policy)
    return {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "production-fleet",
        "workload": {
            "requests": requests,
            "service_classes": {
                "chat": {"priority": 0, "ttft": 1.0, "tpot": 0.05},
                "agent": {"priority": 1, "ttft": 2.0, "tpot": 0.08},
                "batch": {"priority": 2, "ttft": 30.0},
            },
            "tasks": [task("chat", 5, 600, 120), task("agent", 3, 900, 60), task("batch", 2, 1200, 150)],
            "models": {"count": len(pools), "zipf": 0.5},
            "prefixes": {"groups": 200, "tokens": 512, "zipf": 1.0},
            "arrivals": {
                "process": "poisson", "rate": 1 / SECONDS_A_REQUEST,
                "profile": {"swing": 0.6, "period": requests * SECONDS_A_REQUEST},
            },
        },
        "engine": engine,
        "step_time": {"source": "linear", "overhead": 0.0083, "per_token": 6.2e-5, "per_kv_token": 3.2e-7},
        "system": system,
        "detail": False,
    }  # fmt: skip


def measure(requests: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """Simulate once: CPU seconds, peak memory, and the work."""
    plan = prepare(scenario(requests, parts), Path("scenario.yaml")).cases[0].plan
    started = time.process_time()
    run = Simulation(plan).run()
    cpu = time.process_time() - started
    return {
        "requests": requests,
        "parts": list(parts),
        "cpu": cpu,
        "microseconds_per_request": 1e6 * cpu / requests,
        "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "steps": sum(log.num_steps for log in run.logs),
        "output_tokens": sum(run.columns.output_tokens),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--all-parts", action="store_true", help="also with fewer and fewer parts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for first in range(len(PARTS) + 1 if options.all_parts else 1):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = pool.apply(measure, (options.requests, PARTS[first:]))
        rows.append(row)
        print(
            f"{row['requests']:>8} requests, {', '.join(row['parts']) or 'none of the parts'}: {row['cpu']:.1f} s of "
            f"CPU time, {row['microseconds_per_request']:.0f} µs each, {row['memory_mib']:.0f} MiB, "
            f"{row['steps'] / row['requests']:.0f} steps a request",
            flush=True,
        )
    if options.out:
        document = {**provenance("twin.benchmark-production-fleet/1"), "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
