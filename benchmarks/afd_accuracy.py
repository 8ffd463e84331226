"""Accuracy of the barrier-aware theory against the simulated steady state, at every ratio, for many workloads.

    python -m benchmarks.afd_accuracy [--trace FILE] [--ratio 1:32] [--requests 10000]
                                    [--advance independent] [--out FILE]

Prints a line a workload: the largest and the median difference over the ratios, how many differences lie within the
simulation's own 95 % interval, and the optimal ratios. Exit code 4 if a difference exceeds --tolerance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from scenarios.reading import apply, read_scenario
from twin.executors.executor import Processes
from twin.process import usable_cores
from twin.sweeps.ratio_sweep import prepare

EXAMPLE = Path(__file__).parent.parent / "examples" / "afd-deepseek-v3.yaml"


def lengths(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    """Settings of a synthetic workload."""
    return {"workload.prefill": prefill, "workload.decode": decode}


def lognormal(mean: float, cv: float) -> dict[str, Any]:
    """A log-normal section of a scenario."""
    return {"distribution": "lognormal", "mean": mean, "cv": cv}


def workloads(trace: Path | None) -> dict[str, dict[str, Any]]:
    """Every workload by name, as settings of the example scenario."""
    cases = {
        "paper: B=256 P=100 D=500": {},
        "paper: B=128": {"batch_size": 128},
        "paper: B=512": {"batch_size": 512},
        "paper: D=100": {"workload.decode.mean": 100},
        "paper: P=500": {"workload.prefill.mean": 500},
        "three microbatches": {"microbatches": 3},
        "log-normal, cv 1": lengths(lognormal(100, 1.0), lognormal(500, 1.0)),
        "log-normal, cv 1.5": lengths(lognormal(500, 1.5), lognormal(300, 1.5)),
        "uniform": lengths(
            {"distribution": "uniform", "low": 1, "high": 199}, {"distribution": "uniform", "low": 1, "high": 999}
        ),
        "uniform, narrow": lengths(
            {"distribution": "uniform", "low": 50, "high": 150}, {"distribution": "uniform", "low": 300, "high": 700}
        ),
        "fixed answers": lengths({"distribution": "geometric", "mean": 100}, {"distribution": "fixed", "mean": 500}),
        "stationary start": {"start": "stationary"},
    }
    if trace is not None:
        recorded = {"workload.prefill": None, "workload.decode": None}
        cases["Azure chat, joint"] = {**recorded, "workload.trace": {"path": str(trace.absolute())}}
        cases["Azure chat, shuffled"] = {
            **recorded,
            "workload.trace": {"path": str(trace.absolute()), "pairing": "independent"},
        }
    return cases


def compare(settings: dict[str, Any], ratio: str, requests: int, advance: str) -> dict[str, Any]:
    """Sweep one workload and compare theory and simulation at every ratio."""
    changes = {**settings, "requests_per_instance": requests, "advance": advance}
    document = apply(read_scenario(EXAMPLE, "afd-bundle"), changes)
    sweep = prepare(document, EXAMPLE, ratio)
    documents: dict[str, dict[str, Any]] = {}
    for _ in sweep.run(documents, lambda key, point: None, Processes(usable_cores())):
        pass
    summary = sweep.summarise(documents)
    points = summary["points"]
    gaps = [point["throughput_per_instance_barrier"] / point["throughput_per_instance_steady"] - 1 for point in points]
    # Where the FFN alone sets the pace the interval has no width: 0.05 % is allowed for what the theory rounds.
    within = [
        point["throughput_ci"][0] * 0.9995
        <= point["throughput_per_instance_barrier"]
        <= point["throughput_ci"][1] * 1.0005
        for point in points
    ]
    return {
        "largest": max(gaps, key=abs),
        "at": points[max(range(len(gaps)), key=lambda index: abs(gaps[index]))]["ratio"],
        "median": statistics.median(map(abs, gaps)),
        "within_interval": sum(within) / len(within),
        "points": len(points),
        "r_star": summary["theory"]["r_star"],
        "r_star_barrier": summary["theory"]["r_star_barrier"],
        "simulated_best": summary["simulation"]["best_ratio"],
    }


def main() -> int:
    """Run every workload and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--ratio", default="1:32")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--advance", choices=("lockstep", "independent"), default="lockstep")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    titles = ("largest", "at r", "median", "in CI", "r*", "barrier", "simulated")
    print(f"{'workload':28}" + "".join(f"{title:>10}" for title in titles))
    for name, settings in workloads(arguments.trace).items():
        if arguments.only in name:
            result = results[name] = compare(settings, arguments.ratio, arguments.requests, arguments.advance)
            cells = (
                f"{100 * result['largest']:+.2f}%",
                f"{result['at']:g}",
                f"{100 * result['median']:.2f}%",
                f"{100 * result['within_interval']:.0f}%",
                f"{result['r_star']:.2f}",
                f"{result['r_star_barrier']:.2f}",
                f"{result['simulated_best']:g}",
            )
            print(f"{name:28}" + "".join(f"{cell:>10}" for cell in cells), flush=True)
    if arguments.out:
        document = {**provenance("twin.benchmark-afd-accuracy/1"), "workloads": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if any(abs(result["largest"]) > arguments.tolerance for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
