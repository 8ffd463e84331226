"""`twin calibrate`: makes calibrations and step-time files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from twin.cli.calibrate_steps import steps
from twin.cli.commands import COMMANDS
from twin.cli.options import FileOrStdout, Flag, Fresh, Json, Output, Settings
from twin.cli.refine import refine
from workloads.errors import BadInput, missing_extra

MISSED = 4
"""Exit code: an operation's held-out error is above its limit."""

calibrate = App(name="calibrate", help=COMMANDS["calibrate"].summary)
calibrate.command(refine)
calibrate.command(steps)


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
    from latency_models.deployment.hardware import load_hardware
    from latency_models.deployment.models import load_model
    from latency_models.deployment.roofline import derive, read_deployment
    from scenarios.overrides import apply, single_settings
    from twin.cli.console import write_or_print

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
    from latency_models.origin import Origin
    from latency_models.sources.registry import KERNEL_TABLES, source_of
    from twin.api.arguments import require_at_least
    from twin.cli.console import note, write_or_print
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
    from latency_models.calibration.fitting import fit_calibration, read_measurements
    from twin.cli.console import write_or_print

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
    from twin.api.arguments import require_at_least
    from twin.cli.console import note, print_json, print_table, progress

    try:
        from live.calibration import calibrate as calibration
    except ImportError as error:
        raise missing_extra("live", error, field="twin calibrate run") from None
    require_at_least("--threads", threads, 1)
    calibration.use_threads(device, threads)
    plan = calibration.make_plan(model, device, dtype, ops.split(",") if ops else None, coarse=coarse, quick=quick)
    journal = calibration.open_journal(plan, output, fresh=fresh)
    try:
        with progress("calibrate", calibration.count(plan), len(journal.entries)) as advance:
            result = calibration.calibrate(plan, journal, output, advance)
    except KeyboardInterrupt:
        summary = f"{len(journal.entries)} measurements are kept in {journal.path}, and the same command takes up there"
        raise KeyboardInterrupt(summary if journal.entries else "") from None
    if not no_figures:
        _draw(calibration.pictures(plan, journal, result), output.with_name(f"{output.stem}-figures"))
    if (link := calibration.link_of(output)).exists():
        note(f"all-reduces: {link}, for step_time.communication.link")
    document = result.model_dump(mode="json", by_alias=True, exclude={"tables", "ec"}, exclude_none=True)
    if json:
        print_json(document)
    else:
        print_table(operations_report(document))
    return 0 if all(operation.holds for operation in result.operations.values()) else MISSED


def _draw(pictures: dict[str, dict[str, Any]], folder: Path) -> None:
    from reports.calibration_figures import operation_figure
    from reports.records.run_directory import write_text

    for name, picture in pictures.items():
        write_text(folder / f"{name.replace('/', '-')}.svg", operation_figure(picture))
