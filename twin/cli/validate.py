"""`twin validate`: one scenario on both plants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from live.validation.plant import LivePlant
    from reports.records.run_directory import RunDirectory
    from twin.scenarios.validation import ValidationScenario
    from twin.serving.plan import ServingPlan

FLAG = Parameter(negative=())

SCHEMA = "twin.validation/1"
PROBE_SEED = 1
HELD_OUT = 5
"""Every so manieth round of probing teaches nothing: it says how good the fit is."""


def validate(
    scenario: Path,
    /,
    *,
    backend: Literal["cpu", "cuda"] = "cpu",
    calibration: Path | None = None,
    repeats: int | None = None,
    tolerance: float = 1.0,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
) -> int:
    """Run a real model on this machine, predict the same with the twin, and say how far they are apart.

    Without a calibration the engine is probed first: timed steps of every kind teach the twin what a step takes. Then
    each load is played in real time, and the twin is given the very same requests. Keep the machine idle meanwhile.
    Exit code 4: something is further off than its goal.

    Parameters
    ----------
    scenario
        A scenario of kind validation.
    backend
        Where the model runs.
    calibration
        Engine steps that an earlier validation has measured (its run folder has them); default: the scenario's, or
        else probe.
    repeats
        Of each load, in place of the scenario's.
    tolerance
        Goals are multiplied by this.
    set_
        A field of the scenario, key=value.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Where run folders go.
    """
    from latency_models.strict import read_yaml
    from reports.records.run_directory import open_run
    from twin.cli.console import note, print_json, print_table, require_at_least
    from twin.cli.drawing import illustrate
    from twin.cli.manifest import manifest
    from twin.scenarios.overrides import single_settings
    from twin.scenarios.validation import check_validation
    from twin.validation.compare import missed
    from workloads.errors import BadInput

    require_at_least("--repeats", repeats, 2)
    if not tolerance > 0:
        raise BadInput("expected a number above 0", field="--tolerance", value=tolerance)
    checked = check_validation(read_yaml(scenario), single_settings(set_ or []), scenario)
    if repeats is not None:
        checked = checked.model_copy(update={"repeats": repeats})
    plant = _plant(checked, scenario.parent, backend)
    asked = {"scenario_file": str(scenario), "scenarios": [checked.model_dump(mode="json", by_alias=True)]}
    with open_run(runs, "validate", checked.name, manifest(asked), resume=False) as run:
        file = calibration or (scenario.parent / checked.calibration if checked.calibration else None)
        steps = file or _probe(plant, checked, run)
        document = _validate(plant, checked, steps, note)
        document["missed"] = missed(document["loads"], tolerance)
        document["tolerance"] = tolerance
        document["run"] = {"id": run.id, "directory": str(run.path)}
        run.write_json("summary.json", document)
        illustrate(document, run)
        run.set_status(True, "complete")
    if json:
        print_json(document)
    else:
        from reports.validation.table import validation_table

        print_table(validation_table(document))
    note(f"run folder: {run.path}")
    return 4 if document["missed"] else 0


def _plant(scenario: ValidationScenario, base: Path, backend: str) -> LivePlant:
    from workloads.errors import BadInput

    try:
        from live.validation.plant import LivePlant
    except ImportError as error:
        raise BadInput(
            f"expected the extra [live] to be installed ({error})", field="--backend", value=backend
        ) from None
    spec = scenario.model
    return LivePlant(
        base / spec.path, random=spec.weights == "random", dtype=spec.dtype, device=backend, threads=spec.threads,
        seed=scenario.seed,
    )  # fmt: skip


@contextlib.contextmanager
def _blaming(section: str) -> Iterator[None]:
    """A request that the live engine refuses was asked for by this section of the scenario."""
    from workloads.errors import BadInput

    try:
        yield
    except ValueError as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(str(error), field=section) from None


def _probe(plant: LivePlant, scenario: ValidationScenario, run: RunDirectory) -> Path:
    """Time steps of every kind, fit, and write what was learnt into the run folder."""
    import datetime
    import functools

    from latency_models.engine_steps import EngineSteps
    from latency_models.strict import checked, write_yaml
    from live.validation.probe import Reach, probe, repeat_spread
    from twin.cli.console import progress
    from twin.scenarios.serving import EngineSpec

    engine = checked(EngineSpec, scenario.engine, None, "engine")
    config = engine.build(run.path, None)
    make = functools.partial(plant.engine, config, ahead=engine.async_scheduling)
    spec = scenario.probe
    reach = Reach(spec.prompt, spec.answer, config.max_num_seqs, spec.rounds, spec.steps)
    with progress("probing the engine", spec.rounds, 0, every=25) as advance, _blaming("probe"):
        rounds = probe(make, reach, plant.vocabulary, PROBE_SEED, advance)
    taught = [step for i, steps in enumerate(rounds) if i % HELD_OUT for step in steps]
    held_out = [step for i, steps in enumerate(rounds) if not i % HELD_OUT for step in steps]
    model = EngineSteps(config.block_tokens).fit(taught)
    told = plant.describe()
    document = model.document(
        errors=model.errors(held_out),
        repeat_spread=repeat_spread(rounds),
        provenance={
            "method": "measured",
            "source": f"{sum(map(len, rounds))} timed steps of the live engine in {spec.rounds} rounds",
            "device": told["device"],
            "model": scenario.model.path,
            "date": datetime.date.today().isoformat(),
            "commit": run.manifest.get("commit"),
            "versions": told["versions"],
            "note": f"{told['dtype']}; every {HELD_OUT}th round held out",
        },
    )
    file = run.path / "engine-steps.yaml"
    run.write_text(file.name, write_yaml(document))
    return file


def _validate(plant: LivePlant, scenario: ValidationScenario, steps: Path, say: Any) -> dict[str, Any]:
    """The document `twin.validation/1`."""
    from latency_models.engine_steps import read_engine_steps
    from latency_models.strict import read_yaml

    read_engine_steps(steps)
    capacity = _capacity(scenario, steps)
    say(f"the twin finds a capacity of {capacity:.2f} requests/s")
    plans = {load: _plan(scenario, steps, load * capacity) for load in scenario.loads}
    played: dict[float, list[Any]] = {load: [] for load in scenario.loads}
    for repeat in range(scenario.repeats):  # loads alternate, so that a drift of the machine meets all of them
        for load, plan in plans.items():
            say(f"repeat {repeat + 1} of {scenario.repeats}, load {load:g}: {plan.requests} requests live")
            with _blaming("workload"):
                played[load].append(_play(plant, plan, repeat))
    return {
        "schema": SCHEMA,
        "name": scenario.name,
        "note": "Measured on the live plant; predicted by simulation of the same requests.",
        "scenario": scenario.model_dump(mode="json", by_alias=True),
        "plant": plant.describe(),
        "calibration": read_yaml(steps),
        "capacity": capacity,
        "loads": [_load(load, plans[load], played[load], capacity) for load in scenario.loads],
    }


def _capacity(scenario: ValidationScenario, steps: Path) -> float:
    """Requests a second that the twin answers when there is always somebody waiting."""
    from twin.serving.run import simulate
    from twin.serving.summary import summarise

    plan = _plan(scenario, steps, None)
    rate = summarise(simulate(plan), plan.scenario.measure)["request_throughput"]
    assert isinstance(rate, float)
    return rate


def _plan(scenario: ValidationScenario, steps: Path, rate: float | None) -> ServingPlan:
    from twin.sweeps.serving_sweep import prepare

    return prepare(scenario.serving(steps, rate), Path("scenario")).cases[0].plan


def _play(plant: LivePlant, plan: ServingPlan, repeat: int) -> Any:
    from live.validation.play import play
    from live.validation.prompts import materialise
    from twin.serving.run import realisation

    config = plan.config
    generations = [
        materialise(request, answer, plant.vocabulary, config.block_tokens, config.prefix_id_tokens)
        for request, answer in realisation(plan, repeat)
    ]
    ahead = plan.scenario.engine.async_scheduling
    return play(plant.engine(config, plan.chunks(), ahead=ahead), generations)


def _load(load: float, plan: ServingPlan, played: list[Any], capacity: float) -> dict[str, Any]:
    """One load: metrics and steps over its repeats, curves, and a timeline of the first."""
    from twin.serving.run import simulate
    from twin.serving.series import quantiles
    from twin.serving.summary import latencies, pooled_gaps, summarise
    from twin.validation.compare import StepTimes, compare_load, compare_steps, curves, summary
    from twin.validation.timeline import timeline

    measure = plan.scenario.measure
    simulated = [simulate(plan, repeat) for repeat in range(len(played))]
    columns = [each.columns() for each in played]
    steps = [StepTimes.of([(s.batch, s.begin, s.end) for s in each.steps], plan.step_time) for each in played]
    measured, predicted = [summary(each) for each in columns], [summarise(run, measure) for run in simulated]
    found: dict[str, Any] = {"live": curves(columns)}
    import numpy as np

    twin = [latencies(run.columns, measure) for run in simulated]
    found["twin"] = {name: quantiles(np.concatenate([each[name] for each in twin])) for name in twin[0]}
    gaps = [pooled_gaps(run.logs, measure) for run in simulated]
    found["twin"]["itl"] = quantiles(np.concatenate([np.repeat(values, weights) for values, weights in gaps]))
    return {
        "load": load,
        "rate": load * capacity,
        "requests": plan.requests,
        "metrics": compare_load(measured, predicted),
        "measured": measured,
        "predicted": predicted,
        "steps": compare_steps(steps),
        "curves": found,
        "timeline": timeline(columns[0], simulated[0].columns),
        "late": float(np.mean([np.mean(each.late) for each in played])),
    }
