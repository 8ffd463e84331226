"""Plans compared with exhaustive searches, and the time to an answer of a question of some hundred candidates.

    python -m benchmarks.plan exhaustive [--space prefixes|uncertain] [--seeds 100] [--window 1500] [--replications 20]
    python -m benchmarks.plan inventory [--seeds 10] [--window 400] [--replications 4]
    python -m benchmarks.plan chance --candidate NAME [--windows 1000]
    python -m benchmarks.plan question [--tables FOLDER] [--trace FILE] [--jobs 2] [--out FILE]

`exhaustive` plans a space of 216 candidates, once for each seed in turn, and compares with an exhaustive search: all
windows (`--replications`) of each candidate, in the order of prices up to the first that passes, since no dearer one
changes the optimum. The regret is the price of the recommendation over that of the optimum, less 1. `--truth SEED`
takes one exhaustive search, with other requests, as the truth for all seeds. `share` is of the simulation that all
windows of all candidates would take. `--space prefixes` has prompts that begin alike and two routers, in caches that
hold all beginnings or a third of them; there the exhaustive search begins to count twice as late, so that it would show
windows whose caches are still cold, and reaches pools that would be large enough without any hits. `--space uncertain`
has the small space with a stated error of its step times: the exhaustive search simulates all draws of each candidate
that meets its goals without, and the windows and draws are those that confirm.

`inventory` splits three engines of each of two kinds among two models, and compares with the best split by simulations
of each model on each number of them, by the lesser of both rates.

`chance` is the chance of an hour of one candidate of that space from many windows of seed 1000.

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
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from latency_models.deployment.models import load_model
from latency_models.io.config_io import write_yaml
from latency_models.sources.aiconfigurator.kernels import Placement, compose
from latency_models.sources.aiconfigurator.tables import read_tables
from twin.executors.executor import Processes
from twin.planning.confidence import probability
from twin.planning.confirming import OTHER_SEED
from twin.planning.evaluation import Evaluator
from twin.planning.family_estimates import estimate_families, horizon
from twin.planning.inventory import Demand, Inventory, Option, best_split, divide
from twin.planning.planner import Planner
from twin.planning.question import Question, read_question
from twin.planning.space import Candidate
from twin.planning.windows import Simulations, Trial
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


def prefix_space(seed: int, window: int, replications: int) -> dict[str, Any]:
    """Prompts of which three quarters begin as others do; two sizes of caches, two routers, two budgets of tokens."""
    kinds = [
        {
            "name": name,
            "device": {"type": name, "price_per_hour": price},
            "engine": {"num_gpu_blocks": blocks},
            "step_time": {"source": "linear", "overhead": 0.01, "per_token": 6e-5, "per_kv_token": 2e-8},
        }
        for name, price, blocks in (("small", 1.0, 3000), ("large", 1.4, 9000))
    ]
    document = small_space(seed, window, replications)
    plan = document["plan"] | {
        "goals": {"ttft_p99": "400ms", "tpot_p99": "40ms"},
        "layouts": ["colocated"],
        "vary": {"max_num_batched_tokens": [512, 2048]},
        "routing": ["least_loaded", "prefix_aware"],
        "limits": {"engines": 8},
        "engines": kinds,
    }
    workload = document["workload"] | {
        "prefill": {"distribution": "lognormal", "mean": 2000, "cv": 0.3},
        "arrivals": {"process": "poisson", "rate": 30},
        "prefixes": {"groups": 60, "tokens": 1600, "block_tokens": 160},
    }
    engine = document["engine"] | {"enable_prefix_caching": True}
    return {**document, "name": "prefix-space", "workload": workload, "engine": engine, "plan": plan}


def uncertain_space(seed: int, window: int, replications: int) -> dict[str, Any]:
    """The small space, where step times may be wrong: one standard deviation is 15 %."""
    document = small_space(seed, window, replications)
    for kind in document["plan"]["engines"]:
        kind["step_time"]["spread"] = 0.15
    return document | {"name": "uncertain-space"}


SPACES = {"small": small_space, "prefixes": prefix_space, "uncertain": uncertain_space}


def planned(document: dict[str, Any], path: Path, jobs: int) -> tuple[Planner, dict[str, Any]]:
    """A planner that has run, and what it says."""
    question = read_question(document, {}, path)
    planner = Planner(question, Simulations({}, lambda key, window: None, Processes(jobs)), brief=True)
    return planner, planner.run().document()


def exhaustive(planner: Planner) -> list[Trial]:
    """Trials by all windows of every candidate that is no more expensive than the cheapest one that passes."""
    evaluator = evaluator_of(planner)
    if planner.question.shares_prefixes and planner.question.rate is not None:
        later = 2 * planner.horizon.warmup
        more = round(planner.horizon.warmup * planner.question.rate)
        evaluator.horizon = replace(planner.horizon, warmup=later, long=planner.horizon.long + more)
    trials: list[Trial] = []
    for _, level in groupby(sorted(every(planner), key=cost), key=cost):
        for trial in evaluator.evaluate(list(level), planner.question.spec.replications):
            trials.append(evaluator.add_all_draws(trial) if trial.meets else trial)
        if any(trial.meets for trial in trials):
            break
    return trials


def passes(planner: Planner, trials: list[Trial], name: str) -> bool:
    """True if a candidate meets its goals in all windows; one that is dearer than the optimum is simulated for it."""
    tried = [trial for trial in trials if trial.candidate.name == name]
    if not tried:
        candidate = next(candidate for candidate in every(planner) if candidate.name == name)
        evaluator = evaluator_of(planner)
        (trial,) = evaluator.evaluate([candidate], planner.question.spec.replications)
        tried = [evaluator.add_all_draws(trial) if trial.meets else trial]
    return tried[0].meets


def evaluator_of(planner: Planner) -> Evaluator:
    """An evaluator that has not simulated anything yet, with the seed that confirms where step times may be wrong."""
    question = planner.question
    if any("spread" in kind.step_time for kind in question.spec.engines if kind.step_time):
        question = question.at_seed(question.seed + OTHER_SEED)
    return Evaluator(question, planner.horizon, Simulations({}, lambda key, window: None, planner.simulations.executor))


def every(planner: Planner) -> list[Candidate]:
    """All candidates of a planner that has run."""
    return [candidate for family in planner.families for candidate in family.candidates]


def cost(candidate: Candidate) -> float:
    """The price of a candidate per hour."""
    assert candidate.cost is not None
    return candidate.cost


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Regret and share of the simulation for each seed."""
    truth: list[Trial] | None = None
    if arguments.truth is not None:
        document = SPACES[arguments.space](arguments.truth, arguments.window, arguments.replications)
        truth = exhaustive(planned(document, Path("benchmark.yaml"), arguments.jobs)[0])
    runs = []
    for seed in range(arguments.seeds):
        document = SPACES[arguments.space](seed, arguments.window, arguments.replications)
        planner, answer = planned(document, Path("benchmark.yaml"), arguments.jobs)
        search = planner.simulations.requests
        trials = truth or exhaustive(planner)
        simulated = len(every(planner)) * arguments.replications * arguments.window
        lowest_cost = min(cost(trial.candidate) for trial in trials if trial.meets)
        best = answer["recommendation"]
        runs.append(
            {
                "seed": seed,
                "candidates": len(every(planner)),
                "recommended": best and best["name"],
                "regret": None if best is None else best["cost_per_hour"] / lowest_cost - 1,
                "passes": best is not None and passes(planner, trials, best["name"]),
                "share": search / simulated,
                "claim": best and best["probability"],
                "windows": best and best["windows"],
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


def inventories(arguments: argparse.Namespace) -> dict[str, Any]:
    """Splits of an inventory among two models, whose answers are of other lengths, and the best ones."""
    have, demands = {"small": 3, "large": 3}, [Demand("chat"), Demand("code")]
    runs = []
    for seed in range(arguments.seeds):
        options = [
            Option(model, "bf16", gpu, model_on(gpu, answer, seed, arguments))
            for model, answer in (("chat", 20), ("code", 35))
            for gpu in have
        ]
        simulations = Simulations({}, lambda key, window: None, Processes(arguments.jobs))
        served = lesser(divide(have, demands, options, simulations, brief=True))
        simulated = sum(len(option.plans) for option in options)
        for option in options:
            for gpus in range(1, 4):
                option.simulate(gpus, simulations)
        best = lesser(Inventory(have, demands, options, best_split(have, demands, options)))
        plans = sum(len(option.plans) for option in options)
        runs.append({"seed": seed, "served": served, "best": best, "plans": simulated, "of": plans})
        print(json.dumps(runs[-1]), flush=True)
    good = [run for run in runs if run["served"] >= 0.98 * run["best"]]
    return {"runs": runs, "within_2_percent": len(good), "of": len(runs)}


def model_on(gpu: str, answer: int, seed: int, arguments: argparse.Namespace) -> Question:
    """The question for the highest rate of a model on three engines of one kind of the small space."""
    document = small_space(seed, arguments.window, arguments.replications)
    document["workload"]["decode"]["mean"] = answer
    kinds = [kind for kind in document["plan"]["engines"] if kind["name"] == gpu]
    document["plan"] |= {"engines": kinds, "objective": "throughput", "limits": {"gpus": 3}}
    return read_question({**document, "name": f"{gpu}-{answer}"}, {}, Path("benchmark.yaml"))


def lesser(inventory: Inventory) -> float:
    """The lowest rate of a model, requests per second."""
    return min(inventory.rate(demand.model) for demand in inventory.demands)


def chance(arguments: argparse.Namespace) -> dict[str, Any]:
    """The chance of an hour of one candidate, and its mean excess (misses beyond those allowed) in a window."""
    document = small_space(1000, arguments.window, arguments.windows)
    question = read_question(document, {}, Path("benchmark.yaml"))
    families, _ = estimate_families(question)
    lengths, executor = horizon(question, families), Processes(arguments.jobs)
    evaluator = Evaluator(question, lengths, Simulations({}, lambda key, window: None, executor))
    named = {candidate.name: candidate for family in families for candidate in family.candidates}
    if arguments.candidate not in named:
        raise BadInput(f"expected one of {', '.join(named)}", field="--candidate", value=arguments.candidate)
    (trial,) = evaluator.evaluate([named[arguments.candidate]], arguments.windows)
    excess = trial.excess
    span, deviation = evaluator.windows_in_span(trial.windows), excess.std(axis=0, ddof=1)
    return {
        "candidate": arguments.candidate,
        "windows": len(excess),
        "windows_in_an_hour": span,
        "mean_excess": excess.mean(axis=0).tolist(),
        "standard_error": (deviation / np.sqrt(len(excess))).tolist(),
        "deviation": deviation.tolist(),
        "largest_mean_for_a_chance_of_0.95": (-1.645 * deviation / np.sqrt(span)).tolist(),
        "chance": probability(excess, span),
    }


def big_question(tables: Path, trace: Path, folder: Path) -> dict[str, Any]:
    """The question of the issue, with a file of kernels for each parallelism in `folder`."""
    model, kinds = load_model("llama-3.1-70b"), []
    for degree in DEGREES:
        placement = Placement(tensor_parallel=degree, expert_tensor_parallel=degree)
        file = folder / f"tp{degree}.yaml"
        file.write_text(write_yaml(compose(read_tables(tables), model, placement).document()))
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
    with tempfile.TemporaryDirectory() as folder:
        document = big_question(arguments.tables, arguments.trace, Path(folder))
        begin, cpu = time.monotonic(), _cpu()

        def note(name: str) -> None:
            times[name] = {"elapsed": time.monotonic() - begin, "cpu": _cpu() - cpu}

        question = read_question(document, {}, Path(folder) / "plan.yaml")
        planner = Planner(
            question, Simulations({}, lambda key, window: None, Processes(arguments.jobs)),
            on_better=lambda trial: note("last_better" if "first" in times else "first"),
        )  # fmt: skip
        answer = planner.run().document()
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
    """Run one of them, print and write its results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("exhaustive", "inventory", "chance", "question"))
    parser.add_argument("--space", choices=tuple(SPACES), default="small")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--window", type=int, default=1500)
    parser.add_argument("--replications", type=int, default=20)
    parser.add_argument("--candidate", default="disaggregated small+small max_num_batched_tokens=1024 least_loaded 3+1")
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--truth", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tables", type=Path, default=DATA / "kernel_tables/aiconfigurator/h200_sxm_vllm_0.12.0")
    parser.add_argument("--trace", type=Path, default=DATA / "traces/azure_llm_2023_conv.csv.gz")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    try:
        work = {"exhaustive": compare, "inventory": inventories, "chance": chance, "question": answered}
        document = work[arguments.what](arguments)
    except BadInput as error:
        print(f"benchmarks.plan: {error}", file=sys.stderr)
        return 2
    result = {"provenance": provenance("twin.benchmark-plan/1"), **document}
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
