"""`twin validate`: one scenario, live and simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from live.validation.backend import LiveBackend
    from reports.records.run_directory import RunDirectory
    from scenarios.validation import ValidationScenario

FLAG = Parameter(negative=())


def validate(
    scenario: Path,
    /,
    *,
    backend: Literal["cpu", "cuda"] = "cpu",
    calibration: Path | None = None,
    clock: Literal["wall", "direct"] | None = None,
    repeats: int | None = None,
    tolerance: float = 1.0,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    fresh: Annotated[bool, FLAG] = False,
    json: Annotated[bool, FLAG] = False,
    runs: Path = Path("runs"),
) -> int:
    """Run a real model on this machine, predict the same run with the twin, and compare the two.

    Each load is replayed several times, and the same requests are simulated. Without a calibration the engine is
    profiled before the first replay: a step-time model is fitted to steps of random requests. The errors are those of
    the forecast, which uses nothing that was measured during the replays.
    On a CPU, time is the CPU time of the engine's own computation: the engine does not wait for arrivals, and other
    processes are not counted. On a GPU it is wall time; keep the machine idle meanwhile.
    The same command resumes a validation that was killed.
    Exit code 4: an error of the forecast exceeds its goal.

    Parameters
    ----------
    scenario
        A scenario of kind validation.
    backend
        Device of the model.
    calibration
        Engine steps that an earlier validation measured (`engine-steps.yaml` in its run folder); default: the
        scenario's, or else profile the engine.
    clock
        `wall` time, or `direct`: the CPU time of one thread, with jumps to the next arrival. Default: the scenario's,
        or else direct on a CPU with one thread, where the machine's speed is not read.
    repeats
        Repeats of each load, in place of the scenario's.
    tolerance
        A factor on all goals.
    set_
        A field of the scenario, key=value; `machine_speed=on` or `machine_speed=off`, for instance.
    fresh
        Start anew even if an unfinished validation of the same scenario exists.
    json
        Print one JSON document on stdout and nothing else there.
    runs
        Parent of the run folders.
    """
    from scenarios.kinds import read_scenario
    from scenarios.overrides import single_settings
    from scenarios.validation import check_validation
    from twin.api.arguments import require_at_least
    from twin.api.drawing import illustrate
    from twin.cli.console import note, print_json, print_table
    from twin.validation.compare import missed
    from twin.validation.run import run_validation
    from workloads.errors import BadInput

    require_at_least("--repeats", repeats, 2)
    if not tolerance > 0:
        raise BadInput("expected a number above 0", field="--tolerance", value=tolerance)
    checked = check_validation(read_scenario(scenario, "validation"), single_settings(set_ or []), scenario)
    given_here = {"repeats": repeats, "clock": clock}
    checked = checked.model_copy(update={name: value for name, value in given_here.items() if value is not None})
    checked = checked.on_device(backend)
    engine = _live_backend(checked, scenario.parent, backend)
    given = calibration or (scenario.parent / checked.calibration if checked.calibration else None)
    with _run_folder(checked, scenario, backend, given, runs, fresh=fresh) as run:
        document = run_validation(engine, checked, scenario.parent, given, run, note)
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


def _live_backend(scenario: ValidationScenario, base: Path, device: str) -> LiveBackend:
    from workloads.errors import BadInput

    try:
        from live.validation.backend import LiveBackend
    except ImportError as error:
        raise BadInput(
            f"expected the extra [live] to be installed ({error})", field="--backend", value=device
        ) from None
    spec = scenario.model
    return LiveBackend(
        base / spec.path, random=spec.weights == "random", dtype=spec.dtype, device=device, threads=spec.threads,
        seed=scenario.seed, quantise=spec.quantise.model_dump() if spec.quantise else None,
        async_scheduling=scenario.engine.async_scheduling, clock=scenario.clock or "wall",
        machine_speed_share=scenario.machine_speed.share if scenario.machine_speed else None,
    )  # fmt: skip


def _run_folder(
    checked: ValidationScenario, scenario: Path, backend: str, calibration: Path | None, runs: Path, *, fresh: bool
) -> RunDirectory:
    """The run folder, as a context: if the block fails, the folder records why, and the run can be resumed."""
    from latency_models.io.config_io import read_text
    from reports.records.run_directory import fingerprint, open_run
    from twin.api.manifest import manifest

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
    steps = read_text(calibration) if calibration else ""
    identity = [checked.model_dump(mode="json"), content["version"], backend, str(model), config, steps]
    return open_run(runs, "validate", fingerprint(identity), content, resume=not fresh)
