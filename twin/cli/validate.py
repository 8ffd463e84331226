"""`twin validate`: one scenario, live and simulated."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from reports.run_directory import fingerprint, open_run
from twin.cli.console import Flag, Fresh, RunOptions, Settings, note, print_run
from workloads.errors import BadInput, missing_extra

if TYPE_CHECKING:
    from live.validation.bundle import LiveBundle
    from live.vllm.backend import VllmBackend
    from reports.run_directory import RunDirectory
    from scenarios.validation import BundleValidationScenario, ValidationScenario
    from twin.validation.backend import Backend

Document = dict[str, Any]

EXIT_CODES = {"met": 0, "missed": 4, "undecided": 5}
"""By the verdict of a validation."""


def validate(
    scenario: Path,
    /,
    *,
    backend: Literal["cpu", "cuda"] = "cpu",
    engine: Literal["live", "vllm"] | None = None,
    calibration: Path | None = None,
    clock: Literal["wall", "direct"] | None = None,
    repeats: int | None = None,
    ratio: str | None = None,
    tolerance: float = 1.0,
    measure_only: Flag = False,
    set_: Settings = None,
    fresh: Fresh = False,
    run: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> int:
    """Run a real model on this machine, predict the same run with the twin, and compare the two.

    Each load is replayed several times, and the same requests are simulated. Without a calibration the engine is
    profiled before the first replay: a step-time model is fitted to steps of random requests. The errors are those of
    the forecast, which uses nothing that was measured during the replays.
    On a CPU, time is the CPU time of the engine's own computation: the engine does not wait for arrivals, and other
    processes are not counted. On a GPU it is wall time; keep the machine idle meanwhile. By wall time, vLLM's server is
    started and answers over HTTP.
    With `layout: disaggregated` prefill and decode engines are run, for one model or several.
    With `layout: afd` a bundle of attention and FFN workers is run at several ratios, each worker by its own CPU time.
    The same command resumes a validation that was killed.
    Exit code 4: an error of the forecast exceeds its goal. 5: one does, but other programs disturbed the measurement.

    Args:
        scenario: A scenario of kind validation.
        backend: Device of the model.
        engine: `live`, this project's own engine, or `vllm`, the installed one, in place of the scenario's
            engine.backend.
        calibration: Engine steps that an earlier validation measured (`engine-steps.yaml` in its run folder); default:
            the scenario's, or else profile the engine.
        clock: `wall` time, or `direct`: the CPU time of one thread, with jumps to the next arrival. Default: the
            scenario's, or else direct on a CPU with one thread.
        repeats: Repeats of each load or ratio, in place of the scenario's.
        ratio: Ratios of attention to FFN instances of a bundle, in place of the scenario's: `4`, `1,2,4` or `1:8`.
        tolerance: A factor on all goals.
        measure_only: Only profile and replay one engine; the same command without it then predicts from the run folder,
            on any machine.
        set_: A field of the scenario, key=value.
    """
    from scenarios.reading import read_scenario, single_settings
    from scenarios.validation import BundleValidationScenario
    from twin.api.inputs import require_above_0, require_at_least
    from twin.api.run_folder import complete
    from twin.validation.bundle import BundleValidation
    from twin.validation.profiling import contention, verdict
    from twin.validation.run import EngineValidation

    require_at_least("--repeats", repeats, 2)
    require_above_0("--tolerance", tolerance)
    document, settings = read_scenario(scenario, "validation"), single_settings(set_ or [])
    settings |= {} if engine is None else {"engine.backend": engine}
    options: dict[str, Any] = {"repeats": repeats, "clock": clock, "ratio": ratio, "calibration": calibration}
    options = {name: value for name, value in options.items() if value is not None}
    checked, steps = _checked(document, settings, scenario, backend, options)
    base, is_bundle = scenario.parent, isinstance(checked, BundleValidationScenario)
    live: Any = _bundle_backend(checked, base) if is_bundle else _engine_backend(checked, base, backend)
    if measure_only and is_bundle:
        raise BadInput("expected none with layout: afd", field="--measure-only", value="true")
    with closing(live), _run_folder(checked, steps, scenario, backend, run.runs, fresh=fresh) as folder:
        validation: EngineValidation | BundleValidation
        if is_bundle:
            validation = BundleValidation(live, checked, folder, note)
        else:
            validation = EngineValidation(live, checked, base, steps, folder, note)
            if measure_only:
                validation.measure()
                note(f"measured in {folder.path}; the same command without --measure-only predicts")
                return 0
        result = validation.document()
        result["missed"] = validation.missed(result, tolerance)
        result["tolerance"] = tolerance
        result["contention"] = contention(folder.points().values())
        result["verdict"] = verdict(result["missed"], result["contention"])
        result = complete(folder, result, figures=not run.no_figures)
    print_run(result, as_json=run.json)
    return EXIT_CODES[result["verdict"]]


def _checked(
    document: Document, settings: Document, path: Path, device: Literal["cpu", "cuda"], options: Document
) -> tuple[Any, Path | None]:
    """The scenario with what the command line adds to it, and the file of an earlier calibration of engines."""
    from scenarios.validation import check_bundle_validation, check_validation

    system = document.get("system")
    layout = settings.get("system.layout", system.get("layout") if isinstance(system, dict) else None)
    excluded = "calibration" if layout == "afd" else "ratio"
    if excluded in options:
        expected = f"expected none with layout: {layout or 'colocated'}"
        raise BadInput(expected, field=f"--{excluded}", value=str(options[excluded]))
    if layout == "afd":
        if device != "cpu":
            raise BadInput("expected cpu with layout: afd", field="--backend", value=device)
        if options.get("clock") == "wall":
            raise BadInput("expected direct with layout: afd", field="--clock", value="wall")
        return check_bundle_validation(document, settings | options, path), None
    calibration = options.pop("calibration", None)
    checked = check_validation(document, settings, path).model_copy(update=options).on_device(device)
    return checked, calibration or (path.parent / checked.calibration if checked.calibration else None)


def _engine_backend(scenario: ValidationScenario, base: Path, device: str) -> Backend:
    from twin.validation.backend import AbsentBackend

    if scenario.engine.backend == "vllm":
        return _vllm_backend(scenario, base, device)
    try:
        from live.validation.backend import LiveBackend, model_source
        from live.validation.fleet import FleetBackend
        from live.validation.pools import PoolsBackend
    except ImportError as error:
        raise missing_extra("live", error, field="--backend", value=device) from None
    if scenario.system.kv_link is not None:
        return PoolsBackend(scenario, base)
    if scenario.fleet is not None:
        return FleetBackend(scenario, base)
    try:
        return LiveBackend(
            model_source(scenario.model, base, scenario.seed, device),
            async_scheduling=scenario.engine.async_scheduling, clock=scenario.clock or "wall",
            in_turns=scenario.profiling if scenario.profiling.in_turns else None,
            tensor_parallel_size=scenario.engine.tensor_parallel_size,
        )  # fmt: skip
    except BadInput as error:
        if error.field != "device":
            raise
        return cast("Backend", AbsentBackend(error))


def _vllm_backend(scenario: ValidationScenario, base: Path, device: str) -> VllmBackend:
    from live.vllm.settings import prepare_process

    prepare_process()
    try:
        from live.vllm.backend import VllmBackend, VllmServerBackend
    except ImportError as error:
        raise missing_extra("vllm", error, field="engine.backend", value="vllm") from None
    return VllmBackend(scenario, base) if scenario.clock == "direct" else VllmServerBackend(scenario, base, device)


def _bundle_backend(scenario: BundleValidationScenario, base: Path) -> LiveBundle:
    try:
        from live.validation.bundle import LiveBundle
    except ImportError as error:
        raise missing_extra("live", error, field="system.layout", value="afd") from None
    return LiveBundle(scenario, base)


def _run_folder(
    checked: ValidationScenario | BundleValidationScenario, steps: Path | None, file: Path, device: str, runs: Path,
    *, fresh: bool,
) -> AbstractContextManager[RunDirectory]:  # fmt: skip
    """The run folder, as a context: if the block fails, the folder records why, and the run can be resumed."""
    from latency_models.io.config_io import read_text
    from twin.api.run_folder import manifest

    content = manifest(
        {
            "scenario_file": str(file),
            "scenarios": [checked.model_dump(mode="json", by_alias=True)],
            "backend": device,
            "calibration": str(steps) if steps else None,
        }
    )
    model = (file.parent / checked.model.path).resolve()
    config = read_text(model / "config.json" if model.is_dir() else model)
    text = read_text(steps) if steps else ""
    place = "" if checked.model.weights == "random" else str(model)  # random weights follow from config and seed
    identity = [checked.model_dump(mode="json"), content["version"], device, place, config, text]
    return open_run(runs, "validate", fingerprint(identity), content, resume=not fresh)
