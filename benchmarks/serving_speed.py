"""Speed of the simulation of serving systems.

    python -m benchmarks.serving_speed [--repeat 3] [--million] [--out FILE]

Poisson 5/s an engine, 512 tokens in and 256 out, Llama-2-7B on an A100 (step times stated in the code), chunks of 512;
one engine, or 64 or 1,000 behind a least-loaded router. Whole commands are timed from outside, start-up included; the
loop alone inside this process. Start-up is the whole command with one request, and `twin --help`. Step by step is the
same work with `fast_forward: false`. A million requests are whole commands, too: they write `requests.parquet`
(`detail: requests`), and their peak memory is that of the process. Independent engines, behind round robin, are
simulated together, apart, and apart in two processes. Exit code 4 when the whole command takes over a
second for 10,000 requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import provenance
from latency_models.io.config_io import write_yaml
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import Run
from twin.serving.run.simulation import Simulation
from twin.sweeps.one_run import run_plan
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


class Timing(NamedTuple):
    """Wall and CPU seconds of a process."""

    seconds: float
    cpu: float


def command(requests: int, repeat: int) -> Timing:
    """Median times of `twin simulate` as a process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(write_yaml(changed(requests)))
        return simulate(file, repeat)


def simulate(file: Path, repeat: int) -> Timing:
    """Median times of `twin simulate --json --no-figures` on a scenario file."""
    with tempfile.TemporaryDirectory() as folder:
        return process(["simulate", str(file), "--json", "--no-figures", "--runs", folder], repeat)


def process(arguments: Sequence[str], repeat: int) -> Timing:
    """Median times of the program `twin`. Its modules are cached as bytecode, as those of an installation are."""
    line = [sys.executable, "-m", "twin", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(line, check=True, capture_output=True, env=environment)  # writes the cache
    times = []
    for _ in range(repeat):
        start, cpu = time.perf_counter(), children_cpu()
        subprocess.run(line, check=True, capture_output=True, env=environment)
        times.append((time.perf_counter() - start, children_cpu() - cpu))
    return Timing(*map(statistics.median, zip(*times, strict=True)))


def children_cpu() -> float:
    """CPU seconds of all processes that this one has run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def million(replicas: int, requests: int = 1_000_000) -> dict[str, float]:
    """A whole command that keeps every request: wall and CPU seconds, peak memory (MiB), size of the file (bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scenario.yaml"
        file.write_text(write_yaml({**changed(requests, replicas), "detail": "requests"}))
        start = time.perf_counter()
        line = [sys.executable, "-m", "twin", "simulate", str(file), "--json", "--no-figures", "--runs", folder]
        running = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(running.pid, 0)
        if status:
            raise RuntimeError(f"twin simulate ended with status {status}")
        (written,) = Path(folder).glob("*/requests.parquet")
        return {
            "requests": requests,
            "replicas": replicas,
            "seconds": time.perf_counter() - start,
            "cpu": used.ru_utime + used.ru_stime,
            "memory_mib": used.ru_maxrss / 1024,
            "file_bytes": written.stat().st_size,
        }


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
        "steps": sum(log.num_steps for log in run.logs),
        "simulated_seconds": max(columns.last_token),
        "mean_itl": decoding / (sum(columns.output_tokens) - len(columns.output_tokens)),
    }


def independent(requests: int, repeat: int, replicas: int) -> list[dict[str, Any]]:
    """Loops over engines behind round robin: in one simulation (0 processes), apart in one process, and in two.

    Median seconds elapsed, and the least CPU seconds of all processes together.
    """
    document = changed(requests, replicas)
    document["system"]["routing"] = "round_robin"
    plan = prepare(document, Path("scenario.yaml")).cases[0].plan
    rows = []
    for processes in (0, 1, 2):
        times = [_timed(lambda: _simulate(plan, processes)) for _ in range(repeat)]  # noqa: B023
        rows.append({
            "requests": requests, "replicas": replicas, "processes": processes,
            "seconds": statistics.median(time.seconds for time in times), "cpu": min(time.cpu for time in times),
        })  # fmt: skip
    return rows


def _simulate(plan: ServingPlan, processes: int) -> Run:
    return run_plan(plan, processes=processes) if processes else Simulation(plan).run()


def _timed(work: Callable[[], object]) -> Timing:
    gc.collect()
    start, cpu = time.perf_counter(), children_cpu() + time.process_time()
    work()
    return Timing(time.perf_counter() - start, children_cpu() + time.process_time() - cpu)


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
    parser.add_argument("--million", action="store_true", help="also 1,000,000 requests over 1, 64 and 1,000 engines")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    startup = {"twin --help": process(["--help"], options.repeat), "one request": command(1, options.repeat)}
    whole = {str(n): command(n, options.repeat) for n in (10_000, 100_000)}
    rows = [loop(n, options.repeat) for n in (1000, 10_000, 100_000)]
    rows += [loop(100_000, options.repeat, replicas=replicas) for replicas in (64, 1000)]
    apart = [row for replicas in (64, 1000) for row in independent(100_000, options.repeat, replicas)]
    slow = loop(10_000, options.repeat, fast=False)
    millions = [million(replicas) for replicas in (1, 64, 1000)] if options.million else []
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for what, timing in startup.items():
        print(f"start-up, {what}: {timing.seconds:.3f} s, {timing.cpu:.3f} s of CPU time")
    for n, timing in whole.items():
        print(f"whole command, {n} requests: {timing.seconds:.2f} s, {timing.cpu:.2f} s of CPU time")
    for row in rows:
        print(
            f"{row['requests']:>8} requests, {row['replicas']:>4} replicas: {row['seconds']:7.2f} s, "
            f"{row['microseconds_per_request']:5.1f} µs each, {row['output_tokens_per_second'] / 1e6:.1f} M tokens/s, "
            f"{row['engine_events_per_second']:.0f} engine events/s"
        )
    for row in apart:
        how = {0: "together", 1: "apart"}.get(row["processes"], f"apart in {row['processes']} processes")
        print(
            f"{row['requests']:>8} requests, {row['replicas']:>4} independent engines {how}: {row['seconds']:.2f} s, "
            f"{1e6 * row['cpu'] / row['requests']:.1f} µs of CPU time each"
        )
    longer = slow["seconds"] / rows[1]["seconds"]
    print(f"step by step, 10,000 requests: {slow['seconds']:.2f} s, {longer:.1f} times as long")
    for row in millions:
        print(
            f"a million requests, {row['replicas']:>4} replicas, whole command: {row['seconds']:.1f} s "
            f"({row['cpu']:.1f} s of CPU time), {row['memory_mib']:.0f} MiB, file of {row['file_bytes'] / 1e6:.0f} MB"
        )
    print(f"most memory this process had: {memory:.0f} MiB")
    if options.out:
        document = {
            **provenance("twin.benchmark-serving-speed/5"),
            "repeat": options.repeat,
            "startup": {what: timing._asdict() for what, timing in startup.items()},
            "command": {n: timing._asdict() for n, timing in whole.items()},
            "loop": rows,
            "independent": apart,
            "step_by_step": slow,
            "million": millions,
            "memory_mib": memory,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if whole["10000"].seconds > 1.0 else 0


if __name__ == "__main__":
    sys.exit(main())
