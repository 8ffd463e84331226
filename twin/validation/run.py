"""A validation from its first load to its document: what was played on the live plant, and what the twin says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.engine_steps import read_engine_steps
from latency_models.strict import read_yaml
from twin.scenarios.validation import ValidationScenario
from twin.serving.plan import ServingPlan
from twin.serving.run import Run, realisation, simulate
from twin.serving.series import quantiles
from twin.serving.summary import latencies, pooled_gaps, summarise
from twin.sweeps.serving_sweep import prepare
from twin.validation.compare import StepTimes, compare_load, compare_steps, curves, summary
from twin.validation.learning import measure_pace
from twin.validation.plant import Plant, PlayedRun
from twin.validation.timeline import timeline
from workloads.errors import BadInput

SCHEMA = "twin.validation/1"


@dataclass(frozen=True)
class Take:
    """One repeat of a load: what was played, and the machine's pace by the rounds before and after it."""

    played: PlayedRun
    pace: float


def run_validation(
    plant: Plant, scenario: ValidationScenario, steps: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Play every load, predict it, and set the two side by side: the document `twin.validation/1`.

    Args:
        steps: the file of engine steps to predict with.

    Raises:
        BadInput: a request that the live engine refuses, or a file that cannot be used.
    """
    capacity = _capacity(scenario, steps)
    say(f"the twin finds a capacity of {capacity:.2f} requests/s")
    plans = {load: _plan(scenario, steps, load * capacity) for load in scenario.loads}
    takes = _play_all(plant, scenario, steps, plans, say)
    return {
        "schema": SCHEMA,
        "name": scenario.name,
        "note": "Measured on the live plant; predicted by simulation of the same requests.",
        "scenario": scenario.model_dump(mode="json", by_alias=True),
        "plant": plant.describe(),
        "calibration": read_yaml(steps),
        "capacity": capacity,
        "loads": [_load(load, plans[load], takes[load], capacity) for load in scenario.loads],
    }


@contextlib.contextmanager
def blaming(section: str) -> Iterator[None]:
    """A request that the live engine refuses was asked for by this section of the scenario."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(str(error), field=section) from None


def _capacity(scenario: ValidationScenario, steps: Path) -> float:
    """Requests a second that the twin answers when there is always somebody waiting."""
    plan = _plan(scenario, steps, None)
    rate = summarise(simulate(plan), plan.scenario.measure)["request_throughput"]
    assert isinstance(rate, float)
    return rate


def _plan(scenario: ValidationScenario, steps: Path, rate: float | None) -> ServingPlan:
    return prepare(scenario.serving(steps, rate), Path("scenario")).cases[0].plan


def _play_all(
    plant: Plant,
    scenario: ValidationScenario,
    steps: Path,
    plans: dict[float, ServingPlan],
    say: Callable[[str], None],
) -> dict[float, list[Take]]:
    """Loads alternate, so that a drift of the machine meets all of them."""
    model = read_engine_steps(steps)
    config = next(iter(plans.values())).config
    takes: dict[float, list[Take]] = {load: [] for load in plans}
    before = measure_pace(plant, scenario, config, model)
    for repeat in range(scenario.repeats):
        for load, plan in plans.items():
            with blaming("workload"):
                played = plant.play(plan.config, plan.chunks(), realisation(plan, repeat))
            after = measure_pace(plant, scenario, config, model)
            takes[load].append(Take(played, (before + after) / 2))
            say(
                f"repeat {repeat + 1} of {scenario.repeats}, load {load:g}: {plan.requests} requests live;"
                f" steps take {before:.2f} to {after:.2f} times what was learnt"
            )
            before = after
    return takes


def _load(load: float, plan: ServingPlan, takes: Sequence[Take], capacity: float) -> dict[str, Any]:
    """One load: metrics and steps over its repeats, curves, and a timeline of the first."""
    measure = plan.scenario.measure
    columns = [take.played.columns() for take in takes]
    steps = [StepTimes.of(take.played.spans, plan.step_time, take.pace) for take in takes]
    simulated = [simulate(plan.at_pace(take.pace), i) for i, take in enumerate(takes)]
    # The same with every step scaled to what the run's own took in all: what is left is not the step times'.
    paces = [take.pace * each.slowness for take, each in zip(takes, steps, strict=True)]
    own = [simulate(plan.at_pace(pace), i) for i, pace in enumerate(paces)]
    measured = [summary(each) for each in columns]
    predicted, explained = ([summarise(run, measure) for run in runs] for runs in (simulated, own))
    return {
        "load": load,
        "rate": load * capacity,
        "requests": plan.requests,
        "pace": [take.pace for take in takes],
        "metrics": compare_load(measured, predicted, explained),
        "measured": measured,
        "predicted": predicted,
        "steps": compare_steps(steps),
        "curves": {"live": curves(columns), "twin": _simulated_curves(plan, simulated)},
        "timeline": timeline(columns[0], simulated[0].columns),
        "late": float(np.mean([np.mean(take.played.late) for take in takes])),
    }


def _simulated_curves(plan: ServingPlan, runs: Sequence[Run]) -> dict[str, Any]:
    """As `compare.curves`, of simulated runs."""
    measure = plan.scenario.measure
    each = [latencies(run.columns, measure) for run in runs]
    found = {name: quantiles(np.concatenate([one[name] for one in each])) for name in each[0]}
    gaps = [pooled_gaps(run.logs, measure) for run in runs]
    found["itl"] = quantiles(np.concatenate([np.repeat(values, weights) for values, weights in gaps]))
    return found
