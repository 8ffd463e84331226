"""`twin validate`: one scenario on both plants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from live.validation.plant import LivePlant
    from reports.records.run_directory import RunDirectory
    from twin.scenarios.validation import ValidationScenario

FLAG = Parameter(negative=())


def validate(
    scenario: Path,
    /,
    *,
    backend: Literal["cpu", "cuda"] = "cpu",
    calibration: Path | None = None,
    repeats: int | None = None,
    tolerance: float = 1.0,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    fresh: Annotated[bool, FLAG] = False,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
) -> int:
    """Run a real model on this machine, predict the same with the twin, and say how far they are apart.

    Each load is played in real time, several times, and the twin is given the very same requests. Without a calibration
    the engine is probed before each of these repeats: timed steps of every kind teach the twin what a step takes.
    Between steps the run's clock stops and a yardstick tells the machine's pace. Keep the machine idle meanwhile. The
    same command takes up a validation that was killed.
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
    fresh
        Start anew even if an unfinished validation of the same is there.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Where run folders go.
    """
    from latency_models.strict import read_yaml
    from twin.cli.console import note, print_json, print_table, require_at_least
    from twin.cli.drawing import illustrate
    from twin.scenarios.overrides import single_settings
    from twin.scenarios.validation import check_validation
    from twin.validation.compare import missed
    from twin.validation.run import run_validation
    from workloads.errors import BadInput

    require_at_least("--repeats", repeats, 2)
    if not tolerance > 0:
        raise BadInput("expected a number above 0", field="--tolerance", value=tolerance)
    checked = check_validation(read_yaml(scenario), single_settings(set_ or []), scenario)
    if repeats is not None:
        checked = checked.model_copy(update={"repeats": repeats})
    plant = _plant(checked, scenario.parent, backend)
    given = calibration or (scenario.parent / checked.calibration if checked.calibration else None)
    with _run_folder(checked, scenario, backend, given, runs, fresh=fresh) as run:
        document = run_validation(plant, checked, given, run, note)
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
        seed=scenario.seed, quantise=spec.quantise.model_dump() if spec.quantise else None,
        ahead=bool(scenario.engine.get("async_scheduling")), pace_share=scenario.pace_share,
    )  # fmt: skip


def _run_folder(
    checked: ValidationScenario, scenario: Path, backend: str, calibration: Path | None, runs: Path, *, fresh: bool
) -> RunDirectory:
    """A run folder to be opened with `with`; if the block fails, the folder says why and can be taken up again."""
    from latency_models.strict import read_text
    from reports.records.run_directory import open_run
    from twin.cli.manifest import manifest

    content = manifest(
        {
            "scenario_file": str(scenario),
            "scenarios": [checked.model_dump(mode="json", by_alias=True)],
            "backend": backend,
            "calibration": str(calibration) if calibration else None,
        }
    )
    model = (scenario.parent / checked.model.path).resolve()
    config = read_text(model / "config.json" if model.is_dir() else model)
    learnt = read_text(calibration) if calibration else ""
    fingerprint = checked.fingerprint(content["version"], backend, str(model), config, learnt)
    return open_run(runs, "validate", fingerprint, content, resume=not fresh)
