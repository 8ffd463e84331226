"""Plans of questions at the edge of what engines were measured to do: GPUs that the plan takes over those measured.

    python -m benchmarks.plan_measured --data ../shared/data [--questions 20] [--seed 0] [--jobs 2] [--out FILE]

A question is made of a measured closed loop: its lengths, the rate at which it served, for eight engines like it, and
the TPOT and TTFT that it had as goals of their means. Eight engines did this, so a plan that takes more pays for its
error, or is wrong. The plan chooses their number alone, with step times from data sheets and its usual confidence.
Arrivals are Poisson, which the measured loop's were not. Where the step times are a little too slow even for a batch of
one, no number of engines meets the goals, and the plan refuses. Rows are drawn at random, equally many of each model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.roofline_efficiency import DEVICES, LATER, SILICON
from benchmarks.silicon import SiliconRow, read_silicon_rows
from twin.executors.executor import Processes
from twin.planning.planner import Planner
from twin.planning.question import read_question
from twin.planning.windows import Simulations
from workloads.errors import BadInput

MODELS = ("llama-3.1-70b", "qwen3-32b", "gpt-oss-120b", "deepseek-v3")
LONGEST = 1024
"""Answers, tokens, of the rows that are drawn: longer ones take long to simulate."""

ENGINES, ENOUGH = 8, 1.5
"""Engines that a question is about; the GPUs that a plan should take at most, over those measured."""

BATCH = 16
"""Requests in flight from which more engines, and so smaller batches, make steps shorter. Below, steps take what the
weights do, and the measured TPOT is a goal that no number of engines meets if steps are a little slower."""


def drawn_rows(data: Path, count: int, seed: int) -> list[SiliconRow]:
    """This many measured rows, equally many of each model that has some."""
    rows = [row for name in (SILICON, LATER) for row in read_silicon_rows(data / name, known_only=True)]
    rows = [row for row in rows if row.model in MODELS and row.system in DEVICES and row.expert_parallel == 1]
    rows = [row for row in rows if row.osl <= LONGEST]
    rng = np.random.default_rng(seed)
    groups = [[row for row in rows if row.model == model] for model in MODELS]
    orders = [[group[i] for i in rng.permutation(len(group))] for group in groups]
    turns = [order[i] for i in range(count) for order in orders if i < len(order)]
    return turns[:count]


def rate_of(row: SiliconRow) -> float:
    """Requests per second of one measured engine, by Little's law."""
    return row.concurrency / (row.ttft + (row.osl - 1) * row.tpot)


def question_of(row: SiliconRow) -> dict[str, Any]:
    """The question that eight engines like a measured one just answer."""
    section: dict[str, Any] = {"source": "roofline", "model": row.model, "hardware": DEVICES[row.system]}
    section |= {"tensor_parallel": row.tensor_parallel, "backend": row.backend}
    section |= {"weights": row.precision} if row.precision in ("bf16", "fp8") else {}
    device = {"type": DEVICES[row.system], "count": row.tensor_parallel}
    return {
        "schema": "twin.scenario/1",
        "kind": "serving",
        "name": "measured",
        "workload": {
            "prefill": {"distribution": "fixed", "mean": round(row.isl)},
            "decode": {"distribution": "fixed", "mean": round(row.osl)},
            "arrivals": {"process": "poisson", "rate": float(f"{ENGINES * rate_of(row):.5g}")},
        },
        "engine": {"max_num_seqs": 1024, "enable_prefix_caching": False, "async_scheduling": True},
        "plan": {
            "goals": {"tpot_mean": row.tpot, "ttft_mean": row.ttft},
            "vary": {"max_num_batched_tokens": [8192]},
            "limits": {"engines": 6 * ENGINES},
            "engines": [{"name": "measured", "device": device, "step_time": section}],
            "window": 400,
            "replications": 4,
        },
    }


def plan_of(row: SiliconRow, jobs: int) -> dict[str, Any]:
    """The GPUs that a plan takes for a row over those measured; None where it refuses every candidate."""
    question = read_question(question_of(row), {}, Path("measured.yaml"))
    simulations = Simulations({}, lambda key, window: None, Processes(jobs))
    answer = Planner(question, simulations, brief=True).run().document()
    best, by_estimate = answer["recommendation"], answer["by_best_estimate"]
    measured = ENGINES * row.tensor_parallel
    return {
        "row": row.id,
        "model": row.model,
        "in_flight": row.concurrency,
        "planned": best and best["gpus"] / measured,
        "by_best_estimate": by_estimate and by_estimate["gpus"] / measured,
        "sure": best and best["sure"],
        "reason": "" if best else (answer["nearest_miss"] or answer["ledger"][0])["reason"],
    }


def share(questions: list[dict[str, Any]], name: str) -> float:
    """The share of the questions in which at most `ENOUGH` times the measured GPUs are planned."""
    planned = [question[name] for question in questions]
    return sum(gpus is not None and gpus <= ENOUGH for gpus in planned) / max(len(planned), 1)


def main() -> int:
    """Ask, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    rows = []
    try:
        for row in drawn_rows(arguments.data, arguments.questions, arguments.seed):
            rows.append(plan_of(row, arguments.jobs))
            print(json.dumps(rows[-1]), flush=True)
    except BadInput as error:
        print(f"benchmarks.plan_measured: {error}", file=sys.stderr)
        return 2
    batches = [question for question in rows if question["in_flight"] >= BATCH]
    shares = {
        "share": share(rows, "planned"),
        "share_of_batches": share(batches, "planned"),
        "share_by_best_estimate": share(rows, "by_best_estimate"),
    }
    result = {"provenance": provenance("twin.benchmark-plan-measured/1"), "questions": rows, **shares}
    print(json.dumps({**shares, "of": len(rows), "batches": len(batches)}))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
