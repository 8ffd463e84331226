"""How far the twin is from the live engine on this machine: a validation, several times over.

    python -m benchmarks.validation [--runs 2] [--scenario examples/validate-cpu.yaml] [--backend cpu] [--out FILE]

Each run probes, plays and predicts anew, and its folder stays under runs/. Exit code 4 when a goal is missed
(`twin.validation.compare.GOALS`). Keep the machine idle meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from twin.validation.compare import GOALS

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "validate-cpu.yaml"


def validate(scenario: Path, backend: str) -> dict[str, Any]:
    """One run's document; what it says meanwhile goes on to standard error."""
    command = [sys.executable, "-m", "twin", "validate", str(scenario), "--backend", backend, "--fresh", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 4):
        sys.exit(done.returncode)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def shortened(document: dict[str, Any]) -> dict[str, Any]:
    """What is kept of it: no single request, step or curve."""
    loads = [
        {name: load[name] for name in ("load", "rate", "requests", "pace", "late")}
        | {
            "metrics": {name: entry for name, entry in load["metrics"].items() if entry["goal"] is not None},
            "steps": {name: load["steps"][name] for name in ("all", "by_kind", "total_error")},
        }
        for load in document["loads"]
    ]
    calibration = document["calibration"]
    known = ("heldout_median_error", "heldout_p90_error", "repeat_spread", "yardsticks", "points")
    return {
        "capacity": document["capacity"],
        "calibration": {name: calibration[name] for name in known},
        "loads": loads,
        "missed": document["missed"],
    }


def rows(number: int, document: dict[str, Any]) -> list[str]:
    """A line for each load."""
    lines = []
    for load in document["loads"]:
        errors = [f"{100 * load['metrics'][name]['error']:+{len(name)}.1f}" for name in GOALS]
        median = 100 * load["steps"]["all"]["median"]
        lines.append("  ".join([f"{number:>3}", f"{load['load']:>4g}", *errors, f"{median:>5.1f}"]))
    return lines


def main() -> int:
    """Run, print a line for each load, and say whether all goals were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="validations, one after the other")
    parser.add_argument("--scenario", type=Path, default=EXAMPLE, help="of kind validation")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="where the model runs")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    asked = parser.parse_args()
    if asked.runs < 1:
        parser.error(f"--runs: expected at least 1, found {asked.runs}")
    documents = [validate(asked.scenario, asked.backend) for _ in range(asked.runs)]
    print("errors in %; of steps the median, without its sign")
    print("  ".join(["run", "load", *GOALS, "steps"]))
    for number, document in enumerate(documents, 1):
        print("\n".join(rows(number, document)))
    missed = [line for document in documents for line in document["missed"]]
    goals = (len(GOALS) + 1) * sum(len(document["loads"]) for document in documents)
    print(f"{len(missed)} of {goals} goals missed")
    if asked.out:
        first = documents[0]
        told = {
            **provenance("twin.benchmark-validation/1"),
            "scenario": first["scenario"],
            "plant": first["plant"],
            "runs": [shortened(document) for document in documents],
        }
        asked.out.write_text(json.dumps(told, indent=1) + "\n")
    return 4 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
