"""`twin calibrate`: makes calibrations and step-time files."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from reports.run_directory import write_text
from twin.cli import COMMANDS
from twin.cli.console import (
    FileOrStdout,
    Flag,
    Fresh,
    Json,
    Output,
    Settings,
    note,
    print_result,
    progress,
    write_or_print,
)
from twin.process import configure_libraries
from workloads.errors import BadInput, missing_extra

MISSED = 4
"""Exit code: an operation's held-out error is above its limit."""

calibrate = App(name="calibrate", help=COMMANDS["calibrate"].summary)


@calibrate.command
def roofline(*, hardware: str, model: str, set_: Settings = None, output: FileOrStdout = None) -> int:
    """Derive α and β from a hardware and a model file (AFD appendix B). The file says that they are not measured.

    Args:
        hardware: Built-in name (a100-sxm-80gb, ascend-910c, b200-sxm, gb200, h100-sxm, h200-sxm, l40s, mi300x,
            rtx-pro-6000) or a file.
        model: Built-in name (such as llama-3.1-70b, qwen3-235b-a22b, deepseek-v3; an unknown name lists all) or a file.
        set_: Deployment field, key=value: ffn_cards, experts_per_card, precision, kv_bytes, activation_bytes,
            mtp_depth, link, shared_experts, overhead.attention, overhead.ffn, overhead.communication,
            memory_efficiency, …
    """
    from latency_models.deployment.hardware import derive, load_hardware, read_deployment
    from latency_models.deployment.models import load_model
    from scenarios.reading import apply, single_settings

    deployment = read_deployment(apply({}, single_settings(set_ or [])), "deployment")
    calibration = derive(load_hardware(hardware), load_model(model), deployment, "deployment")
    write_or_print(calibration.to_yaml(), output)
    return 0


@calibrate.command(name="import")
def import_(
    tables: Path | None = None,
    /,
    *,
    aiconfigurator: Flag = False,
    system: str = "",
    model: str | None = None,
    tensor_parallel: int | None = None,
    every_degree: Annotated[bool, Parameter(name="--all", negative=())] = False,
    collectives: Flag = False,
    weights: str | None = None,
    cache: str = "float16",
    gpu: str = "",
    engine: Annotated[str, Parameter(name=["--engine", "--backend"])] = "",
    engine_version: Annotated[str, Parameter(name=["--engine-version", "--version"])] = "",
    output: FileOrStdout = None,
) -> int:
    """Import kernel tables that others have measured, as one file that a scenario's step_time can name.

    A folder of LLMServingSim 2.0's profiler (dense.csv, attention.csv, …) becomes a file for source kernel_tables, with
    the measured ranges and errors at held-out points. Tables of aiconfigurator become the kernels of one model, for
    source aiconfigurator: from a folder of them, or from the data that an installed aiconfigurator-core has. The file
    records GPU, engine, model and tensor parallelism as far as the tables state them; flags state the rest, and must
    not contradict the tables.

    Args:
        tables: Folder of tables (Parquet or CSV, gzipped or not), or of aiconfigurator's systems. Default, with
            --aiconfigurator: those of the installed package.
        aiconfigurator: Take the tables of an installed aiconfigurator-core.
        system: Its name of the GPU, such as h200_sxm, where there are tables of several.
        model: Model whose kernels to take from aiconfigurator's tables: built-in name (with -fp8 for its checkpoint in
            FP8), a model file or a config.json. Else the measured model.
        tensor_parallel: Ranks that share each layer. Default: 1, or as the name of an LLMServingSim folder ends
            (kernels_tp2).
        every_degree: Write a file for each tensor parallelism (1, 2, 4, 8, 16) that the tables have; --output is their
            folder.
        collectives: Take the measured all-reduces of aiconfigurator's tables alone, as a link file for kernel_tables.
        weights: Format of the weights as the tables name it: float16, fp8, fp8_block, … Default: the model's
            (aiconfigurator).
        cache: Format of the KV cache as the tables name it (aiconfigurator).
        gpu: GPU that was measured, if the tables do not state it.
        engine: Engine whose kernels to take where there are several (default vllm), or that was measured, if the tables
            do not state it.
        engine_version: Its version; where there are several, the newest by default.
    """
    from latency_models.io.config_io import write_yaml
    from latency_models.sources.registry import KERNEL_TABLES, source_of
    from latency_models.step_time import Origin
    from twin.api.inputs import require_at_least
    from twin.cli.table_imports import (
        DEGREES,
        ModelRequest,
        find_tables,
        import_aiconfigurator,
        import_collectives,
        import_kernel_tables,
    )

    require_at_least("--tensor-parallel", tensor_parallel, 1)
    if tables is None and not aiconfigurator:
        raise BadInput("expected a folder of tables, or --aiconfigurator", field="TABLES")
    if every_degree and (output is None or tensor_parallel is not None):
        raise BadInput("expected --output, a folder, and no --tensor-parallel", field="--all")
    stated = Origin(gpu, engine, engine_version)
    if collectives:
        imports = [import_collectives(find_tables(tables, system, engine, engine_version))]
    elif tables is not None and not aiconfigurator and source_of(tables) in (KERNEL_TABLES, None) and not system:
        imports = [import_kernel_tables(tables, replace(stated, model=model or "", tensor_parallel=tensor_parallel))]
    else:
        degrees = DEGREES if every_degree else (tensor_parallel or 1,)
        request = ModelRequest(model, degrees, weights, cache, some=every_degree)
        files = find_tables(tables, system, engine, engine_version)
        imports = import_aiconfigurator(files, request, Origin(gpu) if files.system else stated)
    for table in imports:
        for text in dict.fromkeys(table.notes):
            note(text)
        file = output / table.name if output and every_degree else output
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        write_or_print(write_yaml(table.document), file)
    return 0


@calibrate.command
def fit(
    measurements: Path,
    /,
    *,
    name: str,
    device: str,
    model: str,
    time_unit: str = "seconds",
    layers: int | None = None,
    relative: Flag = False,
    output: FileOrStdout = None,
) -> int:
    """Fit α and β by regression on measured times, with intervals, R² and held-out error.

    Args:
        measurements: CSV with the columns component (attention, ffn or communication), size and time. Size is the token
            load of an instance, the requests at one FFN instance, or the requests of one attention instance;
            communication is timed there and back.
        name: Name of the calibration.
        device: The measured device, for the record.
        model: The measured model, for the record.
        time_unit: seconds or cycles.
        layers: Number of the model's layers, if the times are of one layer.
        relative: Weigh errors in proportion to the time.
    """
    from latency_models.calibration import fit_calibration, read_measurements

    calibration = fit_calibration(
        read_measurements(measurements),
        name=name,
        device=device,
        model=model,
        time_unit=time_unit,
        layers=layers,
        relative=relative,
        source=measurements.name,
    )
    write_or_print(calibration.to_yaml(), output)
    return 0


@calibrate.command(name="run")
def run_(
    *,
    device: str,
    model: Path,
    output: Output,
    ops: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    coarse: Flag = False,
    quick: Flag = False,
    fresh: Fresh = False,
    no_figures: Flag = False,
    json: Json = False,
) -> int:
    """Measure this machine: kernels by tokens and contexts, 4-bit layers, messages, and the host's time of a step.

    The file feeds a serving scenario (step_time: {source: calibration_file, path: …}), and an AFD scenario if
    communication was measured. The same command continues a run that was killed. Exit code 4 if an operation's
    held-out median error is above its limit (5 %, or 10 % where repeats on the machine differ by more than 5 %).

    Args:
        device: cpu or cuda.
        model: Hugging Face config.json of a dense model with grouped queries; weights are random.
        output: File to write. Beside it, OUTPUT.measurements.jsonl keeps every measurement, and a folder has the
            figures.
        ops: Comma-separated: layers, attention, head, quantised, overhead, communication. Default: all but the last.
        dtype: float32, bfloat16 or float16. Default: float32 on cpu, bfloat16 on cuda.
        threads: CPU threads to compute with. One (the default) is timed by its own processor time, which other programs
            on the machine disturb less.
        coarse: Measure the most important points, once: about three minutes on a GPU.
        quick: Measure a few points, as a smoke test.
        no_figures: Leave out the figures.
    """
    from reports.calibration import operations_report
    from twin.api.inputs import require_at_least

    try:
        from live.calibration import calibrate as calibration
    except ImportError as error:
        raise missing_extra("live", error, field="twin calibrate run") from None
    require_at_least("--threads", threads, 1)
    calibration.use_threads(device, threads)
    plan = calibration.make_plan(model, device, dtype, ops.split(",") if ops else None, coarse=coarse, quick=quick)
    journal = calibration.open_journal(plan, output, fresh=fresh)
    try:
        with progress("calibrate", plan.count(), len(journal.entries)) as advance:
            result = calibration.calibrate(plan, journal, output, advance)
    except KeyboardInterrupt:
        summary = f"{len(journal.entries)} measurements are kept in {journal.path}, and the same command takes up there"
        raise KeyboardInterrupt(summary if journal.entries else "") from None
    if not no_figures:
        _draw(calibration.pictures(plan, journal, result), output.with_name(f"{output.stem}-figures"))
    if (link := calibration.link_of(output)).exists():
        note(f"all-reduces: {link}, for step_time.communication.link")
    document = result.model_dump(mode="json", by_alias=True, exclude={"tables", "ec"}, exclude_none=True)
    print_result(document, operations_report, as_json=json)
    return 0 if all(operation.holds for operation in result.operations.values()) else MISSED


def _draw(pictures: dict[str, dict[str, Any]], folder: Path) -> None:
    from reports.calibration import operation_figure

    for name, picture in pictures.items():
        write_text(folder / f"{name.replace('/', '-')}.svg", operation_figure(picture))


@calibrate.command
def steps(run: Path, /, *, output: Output, json: Json = False) -> int:
    """Fit step times to a step log of vLLM, and say what was learned, what was not seen, and how sure it is.

    The file is for step_time: {source: engine_regression, path: FILE}. Every fifth stretch of 60 steps is held out.

    Args:
        run: Folder that twin observe --vllm-log wrote, or a step log of a scheduler class of live.vllm.
        output: File to write.
    """
    configure_libraries()
    import numpy as np

    from latency_models.io.config_io import write_yaml
    from latency_models.sources.engine_regression import EngineRegression, EngineRegressionFile
    from latency_models.sources.vllm_step_log.step_log import UNPADDED, read_logged_steps
    from latency_models.timed_runs import ProfiledRounds
    from reports.calibration import step_log_report
    from twin.recording.run_writer import seen
    from twin.validation.profiling import fitted_document

    log = read_logged_steps(run)
    rounds = [[(0.0, step) for step in stretch] for stretch in log.stretches]
    provenance = {
        "device": "unknown", "model": log.model, "versions": {},
        "note": f"steps of a running vLLM, {log.source.name}; every fifth stretch held out",
    }  # fmt: skip
    with np.errstate(all="ignore"):  # of steps that a bad log makes 0
        document = fitted_document([ProfiledRounds(rounds)], UNPADDED, log.clock, provenance)
    if not math.isfinite(document["round_spread"]):
        expected = "expected durations that batches explain; clock: direct is for a model in the scheduler's process"
        raise BadInput(expected, field="step_time_us", file=log.source)
    write_or_print(write_yaml(document), output)
    unknowns = EngineRegression.from_file(EngineRegressionFile.model_validate(document)).unknowns()
    result = {
        "schema": "twin.step-log/1",
        "output": str(output),
        "seen": seen(log),
        **{name: document[name] for name in ("heldout_median_error", "heldout_p90_error", "largest")},
        "unknowns": [asdict(row) for row in unknowns],
    }
    print_result(result, step_log_report, as_json=json)
    note(f"next: step_time: {{source: engine_regression, path: {output}}} in a scenario")
    return 0


@calibrate.command
def refine(
    scenario: Path,
    /,
    *,
    run: Path,
    output: Output,
    first: int | None = None,
    factors: str | None = None,
    set_: Settings = None,
    json: Json = False,
) -> int:
    """Correct step times by a few minutes of the real engine, and predict the rest of its run.

    Learns what the step-time source does not know of itself: host time, kernels in an engine, attention, links. Says
    what the run cannot tell apart. The file is for step_time: {source: refined, path: FILE}; its draws are narrower.

    Args:
        scenario: Scenario file (YAML) of kind serving that describes the engine.
        run: Measured run: a folder with requests.jsonl and meta.json (vLLM's times of each request, or those that twin
            observe and twin replay write), the result of vllm bench serve --save-detailed, a CSV log of vLLM's steps,
            or a folder of metrics pages (twin observe --metrics), which tell one factor.
        output: File to write.
        first: Requests to learn from, in order of arrival; the rest are predicted. Default: a fifth (a tenth of logged
            steps).
        factors: Comma-separated names of what to learn. Default: all, with the deviation that the run leaves of each.
            Those that are named are refused if the run cannot tell them apart.
        set_: Change any field of the scenario, key=value.
    """
    configure_libraries()
    from latency_models.io.config_io import write_yaml
    from reports.calibration import refinement_report
    from scenarios.reading import read_scenario, single_settings
    from twin.api.inputs import require_at_least
    from twin.refinement.question import Question, factor_names
    from twin.refinement.refine import refine

    require_at_least("--first", first, 2)
    settings = single_settings(set_ or [])
    document = read_scenario(scenario, "serving")
    if output.is_dir():
        raise BadInput("expected a file, found a folder", field="--output", value=str(output))
    with progress("refining", None, 0, patience=2.0) as advance:
        result = refine(Question(scenario, document, settings, run, first, factor_names(factors)), advance)
    for text in result.notes:
        note(text)
    write_or_print(write_yaml(result.content(scenario, output)), output)
    print_result({**result.document, "output": str(output)}, refinement_report, as_json=json)
    note(f"next: twin simulate {scenario} --set 'step_time={{source: refined, path: {output}}}'"
         + "".join(f" --set {field}={value}" for field, value in result.document["settings"].items()))  # fmt: skip
    return 0
