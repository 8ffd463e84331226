"""Accuracy of predicted serving engines against measurements of real ones.

    python -m benchmarks.serving_accuracy --data ../shared/data [--out FILE]

Three published measurements: one vLLM run, predicted from kernel tables and its workload; a log of engine steps, the
later half predicted by a fit to the first; closed-loop rows, those marked dev predicted by a fit to those marked calib.
Exit code 4 when an error exceeds its limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from latency_models.sources.aiconfigurator.regression import SiliconRegression
from latency_models.sources.aiconfigurator.silicon import read_silicon_rows
from latency_models.sources.vllm_step_log.step_log import read_step_log
from latency_models.sources.vllm_step_log.step_time import StepRegression
from scenarios.kinds import read_scenario
from twin.serving.reference_run import compare, read_reference_run
from twin.sweeps.serving_sweep import make_run, prepare, report_run
from workloads.errors import BadInput

EXAMPLE = Path(__file__).parent.parent / "examples" / "vllm-rtxpro6000-llama31-8b.yaml"
RUN = "measured/vllm_0.19_rtxpro6000_llama31_8b"
LIMITS = {"ttft.mean": 0.04, "tpot.mean": 0.01, "e2e.mean": 0.018, "tpot.p99": 0.01}
"""Limits of relative errors: those that LLMServingSim 2.0 reaches on this run."""


def vllm_run(data: Path) -> dict[str, Any]:
    """Every metric of the run, measured and predicted."""
    settings = {
        "workload.trace.path": str((data / RUN / "workload.jsonl").absolute()),
        "step_time.path": str((data / RUN / "kernels_tp1").absolute()),
    }
    (task,) = prepare(read_scenario(EXAMPLE, "serving"), EXAMPLE, [settings]).tasks
    summary = report_run(make_run(task), task.plan)["summary"]
    return compare(summary, read_reference_run(data / RUN / "requests.jsonl")["summary"])


def steps(data: Path) -> dict[str, float]:
    """Median relative error of decode-only steps of the later half of each experiment, by workload."""
    taught, later = read_step_log(data / "measured/vllm_0.15.1_h100_llama2_70b_steps.csv.gz").split(0.5)
    model = StepRegression().fit(taught)
    found = {}
    for workload in sorted(set(later.workload.tolist())):
        chosen = later.where((later.workload == workload) & later.decode_only)
        found[workload] = float(np.median(np.abs(model.errors(chosen))))
    return found


def closed_loop(data: Path) -> dict[str, float]:
    """Median and P90 of the relative TPOT error over dev rows."""
    rows = read_silicon_rows(data / "measured/aiconfigurator_silicon_calib_dev.csv.gz")
    model = SiliconRegression(tables=data / "kernel_tables/aiconfigurator").fit([r for r in rows if r.split == "calib"])
    dev = [row for row in rows if row.split == "dev"]
    errors = np.abs(np.array([model.loop(row).tpot / row.tpot - 1 for row in dev]))
    return {"rows": len(dev), "median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9))}


def main() -> int:
    """Predict, compare and print; exit code 4 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    try:
        run, by_workload, loop = vllm_run(asked.data), steps(asked.data), closed_loop(asked.data)
    except BadInput as error:
        parser.error(str(error))
    told = provenance("twin.benchmark-serving-accuracy/1")
    document = {**told, "vllm_run": run, "steps": by_workload, "closed_loop": loop}
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    for name, row in run.items():
        print(f"{name:20s} measured {row['measured']:.5g} predicted {row['predicted']:.5g} {100 * row['error']:+.2f} %")
    for workload, error in by_workload.items():
        print(f"H100 steps, {workload}, decode-only: median {100 * error:.2f} %")
    print(
        f"closed loop, {loop['rows']} dev rows: TPOT median {100 * loop['median']:.2f} %, P90 {100 * loop['p90']:.1f} %"
    )
    missed = [name for name, limit in LIMITS.items() if abs(run[name]["error"]) > limit]
    missed += ["codegen steps"] if by_workload["codegen"] > 0.02 else []
    missed += ["closed loop"] if loop["median"] > 0.08 else []
    if missed:
        print(f"beyond their limits: {', '.join(missed)}")
    return 4 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
