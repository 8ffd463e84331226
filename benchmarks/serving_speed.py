"""Speed of the simulation of serving systems.

    python -m benchmarks.serving_speed [--repeat 3] [--million] [--out FILE]

Poisson 5/s, 512 tokens in and 256 out, Llama-2-7B on an A100 (step times stated in the code), chunks of 512, one
replica. Whole commands are timed from outside, start-up included; the loop alone inside this process. Step by step is
the same work with `fast_forward: false`. Exit code 4 when the whole command takes over a second for 10,000 requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from latency_models.io.config_io import write_yaml
from twin.serving.simulation import Simulation
from twin.sweeps.serving_sweep import prepare

SCENARIO: dict[str, Any] = {
    "schema": "twin.scenario/1",
    "kind": "serving",
    "name": "llama-2-7b-a100",
    "workload": {
        "requests": 10_000,
        "prefill": {"distribution": "fixed", "mean": 512},
        "decode": {"distribution": "fixed", "mean": 256},
        "arrivals": {"process": "poisson", "rate": 5.0},
    },
    "engine": {
        "num_gpu_blocks": 7000,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
    },
    # 13.5 GB of weights at 80 % of 2.04 TB/s; 13.5 GFLOP a token at 70 % of 312 TFLOP/s; 0.5 MB of cache a token.
    "step_time": {"source": "linear", "overhead": 0.0083, "per_token": 6.2e-5, "per_kv_token": 3.2e-7},
    "detail": False,
}
"""Peers on the same work, two cores, 10,000 requests, start-up included, as measured elsewhere: NVIDIA DynoSim 2.0 s,
BLIS 7.1 s, simdistserve 25 s, Vidur 38 s, splitwise-sim 102 s, Frontier 459 s."""


def command(requests: int, repeat: int) -> float:
    """Median wall time of `twin simulate` as a process, seconds."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(write_yaml(changed(requests)))
        for _ in range(repeat):
            start = time.perf_counter()
            line = [sys.executable, "-m", "twin", "simulate", str(file), "--json", "--no-figures", "--runs", folder]
            subprocess.run(line, check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def loop(requests: int, repeat: int, replicas: int = 1, *, fast: bool = True) -> dict[str, float]:
    """The simulation alone, in this process: median seconds (also of CPU time), and the amount of work."""
    document = {**changed(requests, replicas), "fast_forward": fast}
    plan = prepare(document, Path("scenario.yaml")).cases[0].plan
    times, cpu = [], []
    for _ in range(repeat):
        gc.collect()
        gc.disable()
        start, started = time.perf_counter(), time.process_time()
        run = Simulation(plan).run()
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - started)
        gc.enable()
    seconds = statistics.median(times)
    columns = run.columns
    decoding = sum(columns.last_token) - sum(columns.first_token)
    return {
        "requests": requests,
        "replicas": replicas,
        "seconds": seconds,
        "cpu": statistics.median(cpu),
        "microseconds_per_request": 1e6 * seconds / requests,
        "output_tokens_per_second": sum(columns.output_tokens) / seconds,
        "engine_events_per_second": sum(log.events for log in run.logs) / seconds,
        "steps": sum(len(log.ends) for log in run.logs),
        "simulated_seconds": max(columns.last_token),
        "mean_itl": decoding / (sum(columns.output_tokens) - len(columns.output_tokens)),
    }


def changed(requests: int, replicas: int = 1) -> dict[str, Any]:
    """The scenario with `requests` requests, at a rate that grows with the replicas."""
    workload = SCENARIO["workload"]
    arrivals = {"process": "poisson", "rate": 5.0 * replicas}
    system = {"layout": "colocated", "replicas": replicas}
    return {**SCENARIO, "workload": {**workload, "requests": requests, "arrivals": arrivals}, "system": system}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--million", action="store_true", help="also 1,000,000 requests, with the memory they take")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    whole = {str(n): command(n, asked.repeat) for n in (10_000, 100_000)}
    rows = [loop(n, asked.repeat) for n in (1000, 10_000, 100_000)]
    rows.append(loop(100_000, 1, replicas=64))
    slow = loop(10_000, asked.repeat, fast=False)
    if asked.million:
        rows.append(loop(1_000_000, 1))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for n, seconds in whole.items():
        print(f"whole command, {n} requests: {seconds:.2f} s")
    for row in rows:
        print(
            f"{row['requests']:>8} requests, {row['replicas']:>2} replicas: {row['seconds']:7.2f} s, "
            f"{row['microseconds_per_request']:5.1f} µs each, {row['output_tokens_per_second'] / 1e6:.1f} M tokens/s, "
            f"{row['engine_events_per_second']:.0f} engine events/s"
        )
    longer = slow["seconds"] / rows[1]["seconds"]
    print(f"step by step, 10,000 requests: {slow['seconds']:.2f} s, {longer:.1f} times as long")
    print(f"most memory this process had: {memory:.0f} MiB")
    if asked.out:
        document = {
            **provenance("twin.benchmark-serving-speed/2"),
            "repeat": asked.repeat,
            "command": whole,
            "loop": rows,
            "step_by_step": slow,
            "memory_mib": memory,
        }
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if whole["10000"] > 1.0 else 0


if __name__ == "__main__":
    sys.exit(main())
