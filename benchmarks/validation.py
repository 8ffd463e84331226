"""Errors of the twin's forecast of the live engine on this machine: a validation, repeated.

    python -m benchmarks.validation [--runs 2] [--scenario examples/validate-cpu.yaml] [--backend cpu] [--out FILE]

Each run profiles, predicts and replays anew, and its folder stays under runs/. The errors are those of the forecast.
Exit code 4 when the forecast misses a goal (`twin.validation.compare.GOALS`). With the wall clock keep the
machine idle meanwhile; with `clock: direct` leave the run one core of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from twin.validation.compare import GOALS

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "validate-cpu.yaml"


def validate(scenario: Path, backend: str) -> dict[str, Any]:
    """The document of one run, whose progress goes to standard error."""
    command = [sys.executable, "-m", "twin", "validate", str(scenario), "--backend", backend, "--fresh", "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode not in (0, 4, 5):
        sys.exit(process.returncode)
    document: dict[str, Any] = json.loads(process.stdout)
    return document


def shortened(document: dict[str, Any]) -> dict[str, Any]:
    """The document without single requests, steps and curves."""
    loads = [
        {name: load[name] for name in ("load", "rate", "requests", "late")}
        | {
            "metrics": {name: entry for name, entry in load["metrics"].items() if entry["goal"] is not None},
            "steps": _shortened_steps(load["steps"]),
        }
        | ({"engines": load["engines"], "fleets": _fleets(load)} if load.get("engines") else {})
        for load in document["loads"]
    ]
    return {
        "clock": document["clock"],
        "capacity": document["capacity"],
        "calibration": _shortened_calibration(document["calibration"]),
        "loads": loads,
        "missed": document["missed"],
    }


def _fleets(load: dict[str, Any]) -> list[dict[str, Any]]:
    """Goals met and engine-seconds of each repeat of an autoscaled fleet."""
    return [{side: load[side][i]["fleet"] for side in ("measured", "predicted")} for i in range(len(load["measured"]))]


def _shortened_calibration(calibration: dict[str, Any]) -> dict[str, Any]:
    errors = ("heldout_median_error", "heldout_p90_error", "repeat_spread", "round_spread")
    names = (*errors, "clock", "points")
    return {name: calibration[name] for name in names}


def _shortened_steps(steps: dict[str, Any]) -> dict[str, Any]:
    return {name: steps[name] for name in ("all", "by_kind", "total_error")}


def rows(number: int, document: dict[str, Any]) -> list[str]:
    """A line for each load, with the errors of the forecast."""
    lines = []
    for load in document["loads"]:
        entries = {name: load["metrics"].get(name) for name in GOALS}
        errors = [
            f"{100 * entry['error']:+{len(name)}.1f}" if entry else " " * len(name) for name, entry in entries.items()
        ]
        median = 100 * load["steps"]["all"]["median"]
        lines.append("  ".join([f"{number:>3}", f"{load['load']:>4g}", *errors, f"{median:>5.1f}"]))
    return lines


def print_errors(title: str, documents: Sequence[dict[str, Any]]) -> None:
    """A table with a line for each run and load."""
    print(title)
    print("  ".join(["run", "load", *GOALS, "steps"]))
    for number, document in enumerate(documents, 1):
        print("\n".join(rows(number, document)))


def main() -> int:
    """Run, print a line for each load, and return whether the forecast met all goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2, help="number of validations, one after the other")
    parser.add_argument("--scenario", type=Path, default=EXAMPLE, help="a scenario of kind validation")
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="where the model runs")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error(f"--runs: expected at least 1, found {arguments.runs}")
    documents = [validate(arguments.scenario, arguments.backend) for _ in range(arguments.runs)]
    print_errors("errors of the forecast in %; of steps the median without its sign", documents)
    missed = [line for document in documents for line in document["missed"]]
    goals = (len(GOALS) + 1) * sum(len(document["loads"]) for document in documents)
    undecided = any(document["verdict"] == "undecided" for document in documents)
    print(f"the forecast misses {len(missed)} of {goals} goals" + (" on a contended machine" if undecided else ""))
    if arguments.out:
        first = documents[0]
        result = {
            **provenance("twin.benchmark-validation/2"),
            "scenario": first["scenario"],
            "backend": first["backend"],
            "runs": [shortened(document) for document in documents],
        }
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 5 if undecided else 4 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
