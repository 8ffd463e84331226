"""`twin calibrate`: makes calibrations and step-time files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from latency_models.calibration.file_format import Calibration
    from latency_models.origin import Origin

FLAG = Parameter(negative=())

calibrate = App(
    name="calibrate",
    help="Make a calibration file: by measuring this machine, by regression on measurements, or from specifications.",
)


@calibrate.command
def roofline(
    *,
    hardware: str,
    model: str,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative=())] = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> int:
    """Derive α and β from a hardware and a model file (AFD appendix B). The file says that they are not measured.

    Parameters
    ----------
    hardware
        Built-in name (a100-sxm-80gb, b200-sxm, gb200, h100-sxm, h200-sxm) or a file.
    model
        Built-in name (deepseek-v3, llama-3.1-8b, llama-3.1-70b, qwen3-0.6b, qwen3-4b, qwen3-32b, qwen3-30b-a3b,
        qwen3-235b-a22b) or a file.
    set_
        Deployment field, key=value: ffn_cards, experts_per_card, precision, kv_bytes, activation_bytes, mtp_depth,
        link, shared_experts, overhead.attention, overhead.ffn, overhead.communication, memory_efficiency, …
    output
        File to write; default: print it.
    """
    from latency_models.deployment.hardware import load_hardware
    from latency_models.deployment.models import load_model
    from latency_models.deployment.roofline import derive, read_deployment
    from scenarios.overrides import apply, single_settings

    deployment = read_deployment(apply({}, single_settings(set_ or [])), "deployment")
    _write(derive(load_hardware(hardware), load_model(model), deployment, "deployment"), output)
    return 0


@calibrate.command(name="import")
def import_(
    tables: Path,
    /,
    *,
    model: str | None = None,
    tensor_parallel: int | None = None,
    weights: str = "float16",
    cache: str = "float16",
    gpu: str = "",
    engine: str = "",
    engine_version: str = "",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> int:
    """Import kernel tables that others have measured, as one file that a scenario's step_time can name.

    A folder of LLMServingSim 2.0's profiler (dense.csv, attention.csv, …) becomes a file for source kernel_tables, with
    the measured ranges and errors at held-out points. A folder of aiconfigurator's tables becomes the kernels of one
    model, for source aiconfigurator. The file records GPU, engine, model and tensor parallelism as far as the tables
    state them; flags state the rest, and must not contradict the tables.

    Parameters
    ----------
    tables
        Folder of tables, gzipped or not.
    model
        Model whose kernels to take from aiconfigurator's tables: built-in name or a file. Else the measured model.
    tensor_parallel
        Ranks that share each layer. Default: 1, or as the name of an LLMServingSim folder ends (kernels_tp2).
    weights
        Format of the weights as the tables name it: float16, fp8, fp8_block, … (aiconfigurator).
    cache
        Format of the KV cache as the tables name it (aiconfigurator).
    gpu
        GPU that was measured, if the tables do not state it.
    engine
        Engine whose kernels were measured, for example vllm, if the tables do not state it.
    engine_version
        Its version.
    output
        File to write; default: print it.
    """
    from latency_models.io.config_io import write_yaml
    from latency_models.origin import Origin
    from latency_models.sources.recognise import AICONFIGURATOR, source_of
    from reports.records.run_directory import naming
    from twin.api.arguments import require_at_least
    from twin.cli.console import note

    require_at_least("--tensor-parallel", tensor_parallel, 1)
    stated = Origin(gpu, engine, engine_version)
    if source_of(tables) == AICONFIGURATOR:
        document, notes = _aiconfigurator(tables, model, tensor_parallel or 1, weights, cache, stated)
    else:
        document, notes = _kernel_tables(tables, replace(stated, model=model or "", tensor_parallel=tensor_parallel))
    for text in notes:
        note(text)
    text = write_yaml(document)
    if output is None:
        print(text, end="")
    else:
        with naming(output):
            output.write_text(text, encoding="utf-8")
    return 0


def _aiconfigurator(
    tables: Path, model: str | None, ranks: int, weights: str, cache: str, stated: Origin
) -> tuple[dict[str, Any], list[str]]:
    """The document of one model's kernels, and notes on missing data."""
    from latency_models.deployment.models import load_model
    from latency_models.sources.aiconfigurator.kernels import ModelKernels, Placement
    from workloads.errors import BadInput

    if model is None:
        raise BadInput("expected a model, since these tables are of many shapes", field="--model")
    placement = Placement(tensor_parallel=ranks, expert_tensor_parallel=ranks, weights=weights, cache=cache)
    kernels = ModelKernels.load(tables, load_model(model), placement)
    kernels = replace(kernels, origin=kernels.origin.completed(stated))
    return kernels.document(), [*kernels.notes, *kernels.origin.unknown]


def _kernel_tables(tables: Path, stated: Origin) -> tuple[dict[str, Any], list[str]]:
    """The document of a profiler's tables, and notes on missing data."""
    from latency_models.sources.kernel_tables.files import named_degree, read_kernel_tables

    read = read_kernel_tables(tables, describe=True)
    degree = named_degree(tables) if tables.is_dir() else read.tensor_parallel
    origin = replace(read.origin, tensor_parallel=degree).completed(stated)
    assumed = "the folder's name does not end in tp1, tp2, …: taken as 1 rank; --tensor-parallel records it"
    return read.recorded(origin).document(), [*origin.unknown, *([] if origin.tensor_parallel else [assumed])]


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
    relative: Annotated[bool, Parameter(negative=())] = False,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> int:
    """Fit α and β by regression on measured times, with intervals, R² and held-out error.

    Parameters
    ----------
    measurements
        CSV with the columns component (attention, ffn or communication), size and time. Size is the token load of an
        instance, the requests at one FFN instance, or the requests of one attention instance; communication is timed
        there and back.
    name
        Name of the calibration.
    device, model
        The measured device and model, for the record.
    time_unit
        seconds or cycles.
    layers
        Number of the model's layers, if the times are of one layer.
    relative
        Weigh errors in proportion to the time.
    output
        File to write; default: print it.
    """
    from latency_models.calibration.measurements import fit_calibration, read_measurements

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
    _write(calibration, output)
    return 0


@calibrate.command(name="run")
def run_(
    *,
    device: str,
    model: Path,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    ops: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    quick: Annotated[bool, FLAG] = False,
    fresh: Annotated[bool, FLAG] = False,
    no_figures: Annotated[bool, FLAG] = False,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Measure this machine: kernels by tokens and contexts, 4-bit layers, messages, and the host's time of a step.

    The file feeds a serving scenario (step_time: {source: calibration_file, path: …}), and an AFD scenario if
    communication was measured. The same command continues a run that was killed. Exit code 4 if an operation's
    held-out median error is above its limit (5 %, or 10 % where repeats on the machine differ by more than 5 %).

    Parameters
    ----------
    device
        cpu or cuda.
    model
        Hugging Face config.json of a dense model with grouped queries; weights are random.
    output
        File to write. Beside it, OUTPUT.measurements.jsonl keeps every measurement, and a folder has the figures.
    ops
        Comma-separated: layers, attention, head, quantised, overhead, communication. Default: all but the last.
    dtype
        float32, bfloat16 or float16. Default: float32 on cpu, bfloat16 on cuda.
    threads
        CPU threads to compute with. One (the default) is timed by its own processor time, which other programs on the
        machine disturb less.
    quick
        Measure a few points, as a smoke test.
    fresh
        Discard the measurements of a killed run.
    no_figures
        Leave out the figures.
    json
        Print the results of each operation as JSON instead of the table.
    """
    from reports.calibration.table import operations_table
    from twin.api.arguments import require_at_least
    from twin.cli.console import print_json, print_table, progress

    try:
        from live.calibration import calibrate as calibration
    except ImportError as error:
        from workloads.errors import BadInput

        raise BadInput(f"expected serving-twin[live] to be installed: {error}", field="twin calibrate run") from None
    require_at_least("--threads", threads, 1)
    calibration.use_threads(device, threads)
    plan = calibration.make_plan(model, device, dtype, ops.split(",") if ops else None, quick=quick)
    journal = calibration.open_journal(plan, output, fresh=fresh)
    try:
        with progress("calibrate", calibration.count(plan), len(journal.entries)) as advance:
            made = calibration.calibrate(plan, journal, output, advance)
    except KeyboardInterrupt:
        kept = f"{len(journal.entries)} measurements are kept in {journal.path}, and the same command takes up there"
        raise KeyboardInterrupt(kept if journal.entries else "") from None
    if not no_figures:
        _draw(calibration.pictures(plan, journal, made), output.with_name(f"{output.stem}-figures"))
    document = made.model_dump(mode="json", by_alias=True, exclude={"tables", "ec"}, exclude_none=True)
    if json:
        print_json(document)
    else:
        print_table(operations_table(document))
    return 0 if all(operation.holds for operation in made.operations.values()) else MISSED


MISSED = 4


def _draw(pictures: dict[str, dict[str, Any]], folder: Path) -> None:
    from reports.calibration.figures import operation_figure
    from reports.records.run_directory import write_text

    for name, picture in pictures.items():
        write_text(folder / f"{name.replace('/', '-')}.svg", operation_figure(picture))


def _write(calibration: Calibration, output: Path | None) -> None:
    text = calibration.to_yaml()
    if output is None:
        print(text, end="")
        return
    from reports.records.run_directory import naming

    with naming(output):
        output.write_text(text, encoding="utf-8")
