"""A validation from its first load to its document: what was played on the live plant, and what the twin says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.engine_steps import EngineSteps, EngineStepsFile, read_engine_steps_file
from latency_models.strict import read_yaml
from reports.records.run_directory import RunDirectory
from twin.scenarios.validation import ValidationScenario
from twin.serving.pace import Pace
from twin.serving.plan import ServingPlan
from twin.serving.run import Run, realisation, simulate
from twin.serving.series import quantiles
from twin.serving.summary import latencies, pooled_gaps, summarise
from twin.sweeps.serving_sweep import prepare
from twin.validation.compare import StepTimes, compare_load, compare_steps, curves, summary
from twin.validation.learning import Known, Learning
from twin.validation.plant import Plant
from twin.validation.takes import Take
from twin.validation.timeline import timeline
from workloads.errors import BadInput

SCHEMA = "twin.validation/1"


def run_validation(
    plant: Plant, scenario: ValidationScenario, calibration: Path | None, run: RunDirectory, say: Callable[[str], None]
) -> dict[str, Any]:
    """Play every load, predict it, and set the two side by side: the document `twin.validation/1`.

    Args:
        calibration: the file of engine steps to predict with; None: the engine is probed, a part before each repeat.
        run: keeps every part and repeat as soon as it is over, and those that are in it are not run again.

    Raises:
        BadInput: a request that the live engine refuses, or a file that cannot be used.
    """
    learning = Learning(plant, scenario, run, say) if calibration is None else Known(calibration)
    with blaming("probe"):
        learning.go_on()
    beforehand = learning.known("engine-steps-beforehand.yaml")
    _require_yardsticks(beforehand, plant)
    full = _plan(scenario, beforehand, None)
    capacity = _capacity(full)
    say(f"the twin finds a capacity of {capacity:.2f} requests/s")

    def plans(steps: Path) -> dict[float, ServingPlan]:
        # Fewer requests where they come more slowly: all loads take equally long, and drift averages out alike.
        return {
            load: replace(_plan(scenario, steps, load * capacity), requests=max(round(load * full.requests), 1))
            for load in scenario.loads
        }

    first = plans(beforehand)
    takes = _play_all(plant, scenario, first, run, learning, say)
    steps = learning.known("engine-steps.yaml")
    known = read_engine_steps_file(steps)
    loads = [
        {"load": load, "rate": load * capacity, **_load(plan, first[load], takes[load], known)}
        for load, plan in plans(steps).items()
    ]
    return {
        "schema": SCHEMA,
        "name": scenario.name,
        "note": "Measured on the live plant; predicted by simulation of the same requests.",
        "scenario": scenario.model_dump(mode="json", by_alias=True),
        "plant": plant.describe(),
        "calibration": read_yaml(steps),
        "capacity": capacity,
        "loads": loads,
    }


def _require_yardsticks(steps: Path, plant: Plant) -> None:
    """Refuse steps that were learnt without those by which the plant reads its pace."""
    if not read_engine_steps_file(steps).yardsticks.keys() >= set(plant.yardsticks):
        sizes = ", ".join(map(str, plant.yardsticks))
        expected = f"expected the seconds of {sizes} rows, by which the pace is read (or probe.pace_share: 0)"
        raise BadInput(expected, file=steps, field="yardsticks")


@contextlib.contextmanager
def blaming(section: str) -> Iterator[None]:
    """A request that the live engine refuses was asked for by this section of the scenario."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(str(error), field=section) from None


def _capacity(plan: ServingPlan) -> float:
    """Requests a second that the twin answers when there is always somebody waiting, as in this plan."""
    rate = summarise(simulate(plan), plan.scenario.measure)["request_throughput"]
    assert isinstance(rate, float)
    return rate


def _plan(scenario: ValidationScenario, steps: Path, rate: float | None) -> ServingPlan:
    return prepare(scenario.serving(steps, rate), Path("scenario")).cases[0].plan


def _play_all(
    plant: Plant,
    scenario: ValidationScenario,
    plans: dict[float, ServingPlan],
    run: RunDirectory,
    learning: Learning | Known,
    say: Callable[[str], None],
) -> dict[float, list[Take]]:
    """Loads alternate, so that a drift of the machine meets all of them; probing goes on before each round of them."""
    done = run.points()
    names = {_name(load, repeat) for load in plans for repeat in range(scenario.repeats)}
    if there := names & done.keys():
        say(f"taking up {run.path}: {len(there)} of {len(names)} repeats have been played")
    takes: dict[float, list[Take]] = {load: [] for load in plans}
    with blaming("workload"):
        for load, plan in plans.items():
            more = any(_name(load, repeat) not in done for repeat in range(scenario.repeats))
            if more and plant.warm_up(plan.config, plan.chunks(), realisation(plan, scenario.repeats)):
                say(f"load {load:g}: as many requests live, untimed")
    for repeat in range(scenario.repeats):
        if repeat:
            with blaming("probe"):
                learning.go_on()
        for load, plan in plans.items():
            name = _name(load, repeat)
            folder = run.path / "live" / name
            if name in done:
                takes[load].append(Take.read(folder))
                continue
            with blaming("workload"):
                requests = realisation(plan, repeat)
                played = plant.play(plan.config, plan.chunks(), requests)
            take = Take.of(played, plan.config.block_tokens)
            take.write(folder)
            run.add_point(name, {"requests": len(requests), "steps": len(take.steps)})
            takes[load].append(take)
            say(f"repeat {repeat + 1} of {scenario.repeats}, load {load:g}: {plan.requests} requests live")
    return takes


def _name(load: float, repeat: int) -> str:
    """Of a repeat, in the run folder."""
    return f"load-{load}-repeat-{repeat + 1}"


def _load(plan: ServingPlan, beforehand: ServingPlan, takes: Sequence[Take], known: EngineStepsFile) -> dict[str, Any]:
    """One load: metrics and steps over its repeats, curves, and a timeline of the first.

    Args:
        beforehand: the plan as it was before anything was played. known: the steps of `plan`.
    """
    measure, model = plan.scenario.measure, EngineSteps.from_file(known)
    columns = [take.columns() for take in takes]
    paces = [Pace.of(take.readings, known.yardsticks) for take in takes]
    steps = [StepTimes.of(take.steps, model, pace) for take, pace in zip(takes, paces, strict=True)]
    simulated = [simulate(plan, i, pace=pace) for i, pace in enumerate(paces)]
    # With every step scaled to what the run's own took in all: what is left is not the step times'.
    own = [pace.times_as_long(each.slowness) for pace, each in zip(paces, steps, strict=True)]
    measured = [summary(each) for each in columns]
    predicted = [summarise(run, measure) for run in simulated]
    otherwise = {
        "error_at_own_pace": [summarise(simulate(plan, i, pace=pace), measure) for i, pace in enumerate(own)],
        "error_beforehand": [summarise(simulate(beforehand, i), measure) for i in range(len(takes))],
    }
    return {
        "requests": plan.requests,
        "pace": [pace.means() for pace in paces],
        "metrics": compare_load(measured, predicted, otherwise),
        "measured": measured,
        "predicted": predicted,
        "steps": compare_steps(steps),
        "curves": {"live": curves(columns), "twin": _simulated_curves(plan, simulated)},
        "timeline": timeline(columns[0], simulated[0].columns, paces[0]),
        "late": float(np.mean([take.late for take in takes])),
    }


def _simulated_curves(plan: ServingPlan, runs: Sequence[Run]) -> dict[str, Any]:
    """As `compare.curves`, of simulated runs."""
    measure = plan.scenario.measure
    each = [latencies(run.columns, measure) for run in runs]
    found = {name: quantiles(np.concatenate([one[name] for one in each])) for name in each[0]}
    gaps = [pooled_gaps(run.logs, measure) for run in runs]
    found["itl"] = quantiles(np.concatenate([np.repeat(values, weights) for values, weights in gaps]))
    return found
