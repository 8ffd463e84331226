"""Speed of a ratio sweep, and the growth of its cost with r, B and N.

    python -m benchmarks.afd_speed [--repeat 5] [--out FILE]

The whole command is timed from outside, start-up included. Growth is the time of one simulated bundle in this
process, median of the repeats, as a ratio to the first row: linear in completions (N·r) and flat in B is the aim.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from papers.afd.reproduction import BASELINE
from scenarios.afd import check_scenario, parse_ratios
from scenarios.reading import apply
from twin.afd.bundle import Bundle
from twin.afd.plan import make_plan

SCENARIO = Path(__file__).parent.parent / "examples" / "afd-deepseek-v3.yaml"
PAPER_SWEEP = ["sweep", str(SCENARIO), "--ratio", "1,2,4,8,16,24,32", "--json"]


def whole_command(repeat: int, *more: str) -> dict[str, float]:
    """Wall time of the paper's seven-ratio sweep as a process, seconds."""
    times = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeat):
            start = time.perf_counter()
            command = [sys.executable, "-m", "twin", *PAPER_SWEEP, "--runs", folder, *more]
            subprocess.run(command, check=True, capture_output=True)
            times.append(time.perf_counter() - start)
    return {"median": statistics.median(times), "min": min(times), "max": max(times)}


def one_bundle(settings: dict[str, Any], ratio: str, repeat: int) -> dict[str, float]:
    """Median time of simulating one bundle, and the amount of work."""
    scenario = check_scenario(apply(BASELINE, settings), {}, Path("afd"))
    plan = make_plan(scenario, Path(), None)
    (topology,) = parse_ratios(ratio)
    config, supply = plan.config(topology), plan.supply(topology)
    times = []
    for _ in range(repeat):
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        records = Bundle(config, supply).run()
        times.append(time.perf_counter() - start)
        gc.enable()
    completions = scenario.requests_per_instance * topology.attention_instances
    seconds = statistics.median(times)
    tokens = sum(row[7] for row in records.steps)
    return {
        "seconds": seconds,
        "completions": completions,
        "steps": len(records.steps),
        "microseconds_per_completion": 1e6 * seconds / completions,
        "tokens_per_second": tokens / seconds,
    }


def growth(repeat: int) -> dict[str, list[dict[str, Any]]]:
    """One table for each of r, N and B, with the others at the baseline."""
    tables: dict[str, list[dict[str, Any]]] = {
        "r": [{"r": ratio, **one_bundle({}, str(ratio), repeat)} for ratio in (1, 2, 4, 8, 16, 32)],
        "N": [
            {"N": requests, **one_bundle({"requests_per_instance": requests}, "8", repeat)}
            for requests in (2500, 5000, 10_000, 20_000, 40_000)
        ],
        # The same completions and the same number of steps: answers grow with the slots that serve them.
        "B": [
            {"B": batch, **one_bundle({"batch_size": batch, "workload.decode.mean": 2.0 * batch}, "8", repeat)}
            for batch in (64, 128, 256, 512, 1024)
        ],
        "step by step": [
            {"fast_forward": fast, **one_bundle({"fast_forward": fast}, "8", repeat)} for fast in (True, False)
        ],
    }
    return tables


def main() -> int:
    """Run and print; exit code 4 if the sweep takes longer than `--limit`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--limit", type=float, default=4.0, help="seconds that the sweep may take")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sweep = {
        "with figures": whole_command(arguments.repeat),
        "one process": whole_command(arguments.repeat, "--jobs", "1"),
    }
    for name, times in sweep.items():
        print(f"sweep of 7 ratios, {name}: {times['median']:.2f} s (from {times['min']:.2f} to {times['max']:.2f})")
    tables = growth(arguments.repeat)
    for name, rows in tables.items():
        print(f"\ngrowth with {name}")
        for row in rows:
            relative = row["seconds"] / rows[0]["seconds"]
            first = next(iter(row.values()))
            print(
                f"  {first!s:>6}  {row['seconds']:8.3f} s  × {relative:6.2f}  {row['completions']:>8} completions"
                f"  {row['microseconds_per_completion']:7.2f} µs each  {row['tokens_per_second'] / 1e6:7.1f} M tokens/s"
            )
    if arguments.out:
        document = {**provenance("twin.benchmark-afd-speed/1"), "sweep": sweep, "growth": tables}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if sweep["with figures"]["median"] > arguments.limit else 0


if __name__ == "__main__":
    sys.exit(main())
