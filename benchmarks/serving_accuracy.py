"""Accuracy of predicted serving engines against measurements of real ones, and the page about it.

    python -m benchmarks.serving_accuracy --data ../shared/data [--write]

Three published measurements: one vLLM run, predicted from kernel tables and its workload; a log of engine steps;
closed-loop rows. Errors and coverage of 90 % intervals are of predictions with nothing of the configuration fitted,
unless a row says so. `--write` writes the results, the table in docs/accuracy.md and its figure. Exit code 4 when an
error exceeds its limit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import accuracy_page
from benchmarks.left_out import Comparison, closed_loop_rows, logged_steps, pooled
from benchmarks.provenance import provenance
from benchmarks.silicon import read_silicon_rows
from latency_models.sources.vllm_step_log.step_log import read_step_log
from scenarios.reading import read_scenario
from twin.serving.results.report import compare, read_reference_run
from twin.serving.results.uncertainty import flatten
from twin.sweeps.serving_sweep import prepare, run_task
from workloads.errors import BadInput

EXAMPLE = Path(__file__).parent.parent / "examples" / "vllm-rtxpro6000-llama31-8b.yaml"
RUN = "measured/vllm_0.19_rtxpro6000_llama31_8b"
LIMITS = {"ttft.mean": 0.04, "tpot.mean": 0.01, "e2e.mean": 0.018, "tpot.p99": 0.01}
"""Limits of relative errors: those that LLMServingSim 2.0 reaches on this run."""

MEDIANS = {
    "steps, workload left out": 0.04,
    "steps after the first tenth": 0.015,
    "steps at twice the fitted batch": 0.04,
    "TPOT of dev rows, configuration in calib": 0.025,
    "TPOT, configuration left out": 0.07,
    "TPOT of mixtures of experts, configuration left out": 0.12,
    "TPOT, system left out": 0.1,
    "TTFT, configuration left out": 0.15,
}
"""Goals of median relative errors, set before anything was measured."""

RUN_DRAWS = 16


def vllm_run(data: Path) -> tuple[dict[str, Any], Comparison]:
    """Every metric of the run, measured and predicted, and the deviation that draws of the step times expect."""
    settings = {
        "workload.trace.path": str((data / RUN / "workload.jsonl").absolute()),
        "step_time.path": str((data / RUN / "kernels_tp1").absolute()),
    }
    sweep = prepare(read_scenario(EXAMPLE, "serving"), EXAMPLE, [settings], draws=RUN_DRAWS)
    runs = [run_task(task)["summary"] for task in sweep.tasks_of(0)[: 1 + RUN_DRAWS]]
    rows = compare(runs[0], read_reference_run(data / RUN / "requests.jsonl")["summary"])
    draws = [flatten(run) for run in runs[1:]]
    comparison = Comparison("vLLM run, RTX PRO 6000, 16 metrics", fitted=False)
    for name, row in rows.items():
        deviation = float(np.std(np.log([float(run[name] or 0.0) for run in draws]), ddof=1))
        comparison.add(row["measured"], row["predicted"], deviation)
    return rows, comparison


def closed_loop(data: Path) -> list[Comparison]:
    """Closed-loop rows, as `left_out.closed_loop_rows` has them."""
    rows = read_silicon_rows(data / "measured/aiconfigurator_silicon_calib_dev.csv.gz")
    return closed_loop_rows(rows, data / "kernel_tables/aiconfigurator")


def main() -> int:
    """Predict, compare and print; exit code 4 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    try:
        run, of_run = vllm_run(options.data)
        log = read_step_log(options.data / "measured/vllm_0.15.1_h100_llama2_70b_steps.csv.gz")
        comparisons = [of_run, *logged_steps(log), *closed_loop(options.data)]
        left_out = ("steps, workload left out", "TPOT, configuration left out")
        comparisons.append(pooled([of_run, *(comparison for comparison in comparisons if comparison.name in left_out)]))
    except BadInput as error:
        parser.error(str(error))
    summaries = {comparison.name: comparison.summary() for comparison in comparisons}
    for name, row in run.items():
        print(f"{name:20s} measured {row['measured']:.5g} predicted {row['predicted']:.5g} {100 * row['error']:+.2f} %")
    print(accuracy_page.table(summaries))
    if options.write:
        header = provenance("twin.benchmark-serving-accuracy/2")
        document = {**header, "vllm_run": run, "left_out": summaries}
        accuracy_page.write(document, comparisons)
    missed = [name for name, limit in LIMITS.items() if abs(run[name]["error"]) > limit]
    missed += [name for name, limit in MEDIANS.items() if summaries[name]["median"] > limit]
    if missed:
        print(f"beyond their limits: {', '.join(missed)}")
    return 4 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
