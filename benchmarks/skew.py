"""Skewed popularity of models, live and simulated: isolated decode engines degrade, a shared pool does not (SUN 4).

    python -m benchmarks.skew [--zipf 0,1,2] [--rate 12] [--requests 72] [--repeats 1] [--out FILE]

Three models have a prefill engine each. Their requests are decoded by an engine of each model (`isolated`), or by three
engines of which each serves all models (`shared`), at the same rate of requests. The live engines run on one core by
direct execution. A profile with other requests takes turns with them (`profiling.in_turns`), and the twin simulates the
same requests with the step times that are fitted to it. Times are means over requests of all models, and their ratio to
the least skew of the same system.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.provenance import provenance
from latency_models.io.config_io import write_yaml
from live.device import versions
from live.validation.pools import PoolsBackend
from scenarios.reading import read_scenario
from scenarios.validation import ValidationScenario, check_validation
from twin.serving.plan.plan import ServingPlan
from twin.serving.results.summary import summarise
from twin.serving.run.simulation import Simulation, realisation
from twin.sweeps.serving_sweep import prepare
from twin.validation.backend import Recording
from twin.validation.compare import summary
from twin.validation.profiling import fitted_document

SCHEMA = "twin.benchmark-skew/1"
EXAMPLE = Path(__file__).parents[1] / "examples" / "validate-sun-cpu.yaml"
MODELS = 3
METRICS = ("tpot.mean", "tpot.p90", "e2e.mean", "ttft.mean", "output_throughput")


def scenario(decode: str, zipf: float, requests: int) -> ValidationScenario:
    """The example with this many decode engines as models, shared or not."""
    settings = {
        "system.decode": decode,
        "system.decode_replicas": MODELS if decode == "shared" else 1,
        "workload.models": {"count": MODELS, "zipf": zipf},
        "workload.requests": requests,
        "profiling.in_turns": True,
    }
    return check_validation(read_scenario(EXAMPLE, "validation"), settings, EXAMPLE).on_device("cpu")


def plan_of(document: dict[str, Any], rate: float) -> ServingPlan:
    """The plan of a serving scenario at a rate of requests a second."""
    workload = document["workload"] | {"arrivals": {"process": "poisson", "rate": rate}}
    return prepare(document | {"workload": workload}, EXAMPLE).cases[0].plan


def measure(decode: str, skews: list[float], rate: float, requests: int, repeats: int) -> list[dict[str, Any]]:
    """An entry for each skew: measured and predicted metrics, means over repeats."""
    scenarios = {zipf: scenario(decode, zipf, requests) for zipf in skews}
    backend = PoolsBackend(scenarios[skews[0]], EXAMPLE.parent)
    recordings: dict[float, list[Recording]] = {zipf: [] for zipf in skews}
    parts = []
    for repeat in range(repeats):
        for zipf, spec in scenarios.items():
            plan = plan_of(spec.serving_without_times(), rate)
            config = plan.scheduler.config
            replayed = backend.replay(plan.scheduler, realisation(plan, repeat))
            recordings[zipf].append(Recording.of(replayed, config.block_size))
            profiled = replayed.profiled
            if profiled is not None and profiled.rounds:
                parts.append(profiled)
            print(f"{decode}, zipf {zipf:g}, repeat {repeat + 1}: replayed", file=sys.stderr, flush=True)
    about = {"device": "cpu", "model": EXAMPLE.name, "commit": None, "versions": versions(), "note": "in turns"}
    document = fitted_document(parts, scenarios[skews[0]].engine.block_size, "direct", about)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "engine-steps.yaml"
        file.write_text(write_yaml(document), encoding="utf-8")
        plans = {
            zipf: plan_of(spec.serving(file, rate, document["frontend"]), rate) for zipf, spec in scenarios.items()
        }
        return [
            {
                "decode": decode,
                "zipf": zipf,
                "measured": _means([summary(spec.columns()) for spec in recordings[zipf]]),
                "predicted": _means(
                    [summarise(Simulation(plan, i).run(), plan.scenario.measure) for i in range(repeats)]
                ),
            }
            for zipf, plan in plans.items()
        ]


def _means(summaries: list[dict[str, Any]]) -> dict[str, float]:
    means = {}
    for name in METRICS:
        key, _, inner = name.partition(".")
        means[name] = float(np.mean([summary[key][inner] if inner else summary[key] for summary in summaries]))
    return means


def show(entries: list[dict[str, Any]]) -> None:
    """Print a line for each system and skew."""
    print(f"{'decode':>9} {'zipf':>4}  {'TPOT live':>9} {'twin':>7} {'error':>7}  {'to least':>8} {'twin':>5}  "
          f"{'E2E live':>8} {'twin':>7} {'error':>7}")  # fmt: skip
    for entry in entries:
        first = next(candidate for candidate in entries if candidate["decode"] == entry["decode"])
        live, twin = entry["measured"], entry["predicted"]
        name = "tpot.mean"
        print(
            f"{entry['decode']:>9} {entry['zipf']:>4g}  {1e3 * live[name]:>6.2f} ms {1e3 * twin[name]:>7.2f} "
            f"{twin[name] / live[name] - 1:>+7.1%}  {live[name] / first['measured'][name]:>8.2f} "
            f"{twin[name] / first['predicted'][name]:>5.2f}  {1e3 * live['e2e.mean']:>5.0f} ms "
            f"{1e3 * twin['e2e.mean']:>7.0f} {twin['e2e.mean'] / live['e2e.mean'] - 1:>+7.1%}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zipf", default="0,1,2", help="exponents of the models' popularity, the least first")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=72, help="requests of a repeat")
    parser.add_argument("--repeats", type=int, default=1, help="repeats of each skew, with other requests each time")
    parser.add_argument("--out", type=Path, help="write the results to this file, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    skews = [float(number) for number in options.zipf.split(",")]
    entries = [
        entry
        for decode in ("isolated", "shared")
        for entry in measure(decode, skews, options.rate, options.requests, options.repeats)
    ]
    show(entries)
    if options.out:
        settings = {"rate": options.rate, "requests": options.requests, "repeats": options.repeats, "models": MODELS}
        document = {**provenance(SCHEMA), "settings": settings, "entries": entries}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
