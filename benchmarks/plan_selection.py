"""Recommendations by luck: how often candidates near a goal pass the windows that choose, and new ones that confirm.

    python -m benchmarks.plan_selection [--windows 100] [--trials 200] [--out FILE]

Windows of four candidates of the space of `benchmarks.plan`, all cheaper than its optimum and close to a goal, are
simulated. Trials draw from them, with replacement: 20 for the race, and new ones for the confirmation. This shows the
effect of the confirmation at a hundredth of the simulation that many whole plans take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from benchmarks.plan import small_space
from benchmarks.provenance import provenance
from twin.executors.executor import Processes
from twin.planning.confidence import probability
from twin.planning.confirming import PROMISING, Confirmer
from twin.planning.evaluation import Evaluator
from twin.planning.family_estimates import estimate_families, horizon
from twin.planning.question import read_question
from twin.planning.space import Candidate
from twin.planning.windows import Simulations, Trial

NEAR = (
    "disaggregated small+small max_num_batched_tokens=1024 least_loaded 3+1",
    "disaggregated small+small max_num_batched_tokens=512 least_loaded 3+1",
    "disaggregated large+small max_num_batched_tokens=1024 least_loaded 1+2",
    "colocated small max_num_batched_tokens=256 least_loaded 4",
)
RACE = 20


class Resampled:
    """Stands in for an evaluator: its windows are drawn from simulated ones."""

    def __init__(self, evaluator: Evaluator, windows: Sequence[dict[str, Any]], rng: np.random.Generator) -> None:
        self.goals = evaluator.goals
        self._rng = rng
        self._windows = windows
        self._span = evaluator.windows_in_span(windows)
        spec = SimpleNamespace(reliability=evaluator.question.spec.reliability, replications=RACE)
        self.question = SimpleNamespace(seed=0, spec=spec)
        self.horizon = evaluator.horizon
        self._drawn: list[dict[str, Any]] = []

    def is_random(self, candidates: list[Candidate]) -> bool:
        """True: windows differ."""
        return True

    def add_draws(self, trial: Trial) -> Trial:
        """The trial: linear step times have no draws."""
        return trial

    def evaluate(self, candidates: list[Candidate], count: int) -> list[Trial]:
        """The trial by `count` windows; the first ones are those of earlier trials."""
        while len(self._drawn) < count:
            self._drawn.append(self._windows[self._rng.integers(len(self._windows))])
        excess: NDArray[np.float64] = np.array([window["excess"] for window in self._drawn[:count]])
        chance = probability(excess, self._span)
        meets = chance >= self.question.spec.reliability
        return [Trial(candidates[0], chance, self._drawn[:count], True, meets, "" if meets else "misses")]


def trials(evaluator: Evaluator, trial: Trial, count: int) -> dict[str, Any]:
    """Shares of trials in which one candidate passes the race, is tested by new windows, and is confirmed."""
    rng, shares = np.random.default_rng(0), Counter[str]()
    for _ in range(count):
        (raced,) = Resampled(evaluator, trial.windows, rng).evaluate([trial.candidate], RACE)
        shares["race"] += raced.meets
        if raced.probability >= PROMISING:
            last = Confirmer(cast(Evaluator, Resampled(evaluator, trial.windows, rng))).confirm(raced)
            shares["tested"] += 1
            shares["confirmed"] += last.meets
            shares["new_windows"] += len(last.windows)
    excess = trial.excess
    return {
        "candidate": trial.candidate.name,
        "mean_excess": excess.mean(axis=0).tolist(),
        "standard_error": (excess.std(axis=0, ddof=1) / np.sqrt(len(excess))).tolist(),
        **{name: shares[name] / count for name in ("race", "tested", "confirmed", "new_windows")},
    }


def main() -> int:
    """Run, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    question = read_question(small_space(1000, 1500, arguments.windows), {}, Path("benchmark.yaml"))
    families, _ = estimate_families(question)
    lengths, executor = horizon(question, families), Processes(arguments.jobs)
    evaluator = Evaluator(question, lengths, Simulations({}, lambda key, window: None, executor))
    near = [candidate for family in families for candidate in family.candidates if candidate.name in NEAR]
    rows = [trials(evaluator, trial, arguments.trials) for trial in evaluator.evaluate(near, arguments.windows)]
    result = {"provenance": provenance("twin.benchmark-plan-selection/1"), "trials": arguments.trials, "rows": rows}
    print(json.dumps(result, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
