"""Plans beside exhaustive searches, and the time to an answer of a question of some hundred candidates.

    python -m benchmarks.plan exhaustive [--seeds 100] [--window 1500] [--replications 20] [--out FILE]
    python -m benchmarks.plan question [--tables FOLDER] [--trace FILE] [--jobs 2] [--out FILE]

`exhaustive` simulates every candidate of a space of about 200 with all windows, once for each seed in turn, and
compares: the regret is the price of the recommendation over that of the cheapest candidate that all windows of the same
seed let pass, less 1. `--truth SEED` takes one exhaustive search, with other requests, as the truth for all seeds.

`question` is Llama-3.1-70B on H200 (aiconfigurator's tables), the Azure chat trace at 20 requests/s, both layouts,
tensor parallelism 1 to 8 and five chunk sizes. Times are elapsed seconds and CPU seconds of all processes.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from latency_models.deployment.models import load_model
from latency_models.io.config_io import write_yaml
from latency_models.sources.aiconfigurator.kernels import ModelKernels, Placement
from twin.executors.processes import Processes
from twin.planning.judging import Judge, Verdict
from twin.planning.planner import Planner
from twin.planning.question import read_question
from workloads.errors import BadInput

DATA = Path("../shared/data")
DEGREES = (1, 2, 4, 8)


def small_space(seed: int, window: int, replications: int) -> dict[str, Any]:
    """Two kinds of engines with linear step times, together and apart, three budgets of tokens, up to four a pool."""
    kinds = [
        {
            "name": name,
            "device": {"type": name, "price_per_hour": price},
            "step_time": {
                "source": "linear",
                "overhead": 0.01 / speed,
                "per_token": 6e-5 / speed,
                "per_kv_token": 2e-7 / speed,
            },
        }
        for name, price, speed in (("small", 1.0, 1.0), ("large", 2.3, 2.5))
    ]
    return {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "small-space",
        "seed": seed,
        "workload": {
            "prefill": {"distribution": "lognormal", "mean": 200, "cv": 1.0},
            "decode": {"distribution": "geometric", "mean": 20},
            "arrivals": {"process": "poisson", "rate": 150},
        },
        "engine": {"num_gpu_blocks": 4000, "max_num_seqs": 64, "enable_prefix_caching": False},
        "plan": {
            "goals": {"ttft_p99": "250ms", "tpot_p99": "30ms"},
            "layouts": ["colocated", "disaggregated"],
            "link": {"bandwidth": 1e10, "bytes_per_token": 131072},
            "vary": {"max_num_batched_tokens": [256, 512, 1024]},
            "limits": {"engines": 4},
            "engines": kinds,
            "window": window,
            "replications": replications,
        },
    }


def planned(document: dict[str, Any], path: Path, jobs: int) -> tuple[Planner, dict[str, Any]]:
    """A planner that has run, and what it says."""
    question = read_question(document, {}, path)
    planner = Planner(question, {}, lambda key, window: None, Processes(jobs), brief=True)
    return planner, planner.run()


def exhaustive(planner: Planner) -> tuple[list[Verdict], int]:
    """A verdict on every candidate of a planner's space from all windows, and the requests simulated."""
    judge = Judge(planner.question, planner.horizon, {}, lambda key, window: None, planner.executor)
    every = [each for prospect in planner.prospects for each in prospect.candidates]
    return judge.look(every, planner.question.spec.replications), judge.simulated


def price(verdict: Verdict) -> float:
    """The price of a candidate per hour."""
    assert verdict.candidate.cost is not None
    return verdict.candidate.cost


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Regret and share of the simulation for each seed."""
    truth: tuple[list[Verdict], int] | None = None
    if arguments.truth is not None:
        document = small_space(arguments.truth, arguments.window, arguments.replications)
        truth = exhaustive(planned(document, Path("benchmark.yaml"), arguments.jobs)[0])
    runs = []
    for seed in range(arguments.seeds):
        document = small_space(seed, arguments.window, arguments.replications)
        planner, answer = planned(document, Path("benchmark.yaml"), arguments.jobs)
        search = sum(judge.simulated for judge in planner.judges)
        verdicts, simulated = truth or exhaustive(planner)
        least = min(price(each) for each in verdicts if each.meets)
        best = answer["recommendation"]
        runs.append(
            {
                "seed": seed,
                "candidates": len(verdicts),
                "recommended": best and best["name"],
                "regret": None if best is None else best["cost_per_hour"] / least - 1,
                "passes": best is not None
                and any(each.candidate.name == best["name"] and each.meets for each in verdicts),
                "share": search / simulated,
            }
        )
        print(json.dumps(runs[-1]), flush=True)
    good = [run for run in runs if run["regret"] is not None and run["regret"] <= 0.02 and run["passes"]]
    return {
        "runs": runs,
        "within_2_percent": len(good),
        "of": len(runs),
        "largest_share": max(run["share"] for run in runs),
    }


def big_question(tables: Path, trace: Path, folder: Path) -> dict[str, Any]:
    """The question of the issue, with a file of kernels for each parallelism in `folder`."""
    model, kinds = load_model("llama-3.1-70b"), []
    for degree in DEGREES:
        placement = Placement(tensor_parallel=degree, expert_tensor_parallel=degree)
        file = folder / f"tp{degree}.yaml"
        file.write_text(write_yaml(ModelKernels.load(tables, model, placement).document()))
        memory = {
            "memory": 151397597184.0, "model": "llama-3.1-70b", "tensor_parallel_size": degree, "activations": 5e9
        }  # fmt: skip
        kinds.append(
            {
                "name": f"tp{degree}",
                "device": {"type": "h200-sxm", "count": degree},
                "engine": {"kv_memory": memory},
                "step_time": {"source": "aiconfigurator", "path": str(file)},
            }
        )
    return {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "h200-llama-70b",
        "workload": {"trace": {"path": str(trace.absolute())}, "arrivals": {"process": "poisson", "rate": 20}},
        "engine": {"max_num_seqs": 256, "enable_prefix_caching": False},
        "plan": {
            "goals": {"ttft_p99": "1s", "tpot_p99": "40ms"},
            "layouts": ["colocated", "disaggregated"],
            "link": {"bandwidth": 5e10, "bytes_per_token": 327680},
            "vary": {"max_num_batched_tokens": [512, 1024, 2048, 4096, 8192]},
            "engines": kinds,
        },
    }


def answered(arguments: argparse.Namespace) -> dict[str, Any]:
    """Times to the first feasible deployment, to the recommendation, and to the whole answer."""
    times: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        document = big_question(arguments.tables, arguments.trace, Path(made))
        begin, cpu = time.monotonic(), _cpu()

        def note(name: str) -> None:
            times[name] = {"elapsed": time.monotonic() - begin, "cpu": _cpu() - cpu}

        question = read_question(document, {}, Path(made) / "plan.yaml")
        planner = Planner(
            question, {}, lambda key, window: None, Processes(arguments.jobs),
            found=lambda verdict: note("last_better" if "first" in times else "first"),
        )  # fmt: skip
        answer = planner.run()
        note("whole")
    statuses = [entry["status"] for entry in answer["ledger"]]
    return {
        "times": times,
        "answer": answer["answer"],
        "candidates": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
        "simulated_requests": answer["simulated_requests"],
    }


def _cpu() -> float:
    """CPU seconds of this process and of children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> int:
    """Run one of the two, print and write its results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exhaustive", "question"))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--window", type=int, default=1500)
    parser.add_argument("--replications", type=int, default=20)
    parser.add_argument("--truth", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tables", type=Path, default=DATA / "kernel_tables/aiconfigurator/h200_sxm_vllm_0.12.0")
    parser.add_argument("--trace", type=Path, default=DATA / "traces/azure_llm_2023_conv.csv.gz")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    try:
        found = compare(arguments) if arguments.what == "exhaustive" else answered(arguments)
    except BadInput as error:
        print(f"benchmarks.plan: {error}", file=sys.stderr)
        return 2
    result = {"provenance": provenance("twin.benchmark-plan/1"), **found}
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
