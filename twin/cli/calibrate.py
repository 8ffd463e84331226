"""`twin calibrate`: where α and β come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from latency_models.calibration import Calibration

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
    """Derive α and β from a hardware and a model file (AFD appendix B). Derived is not measured, and the file says so.

    Parameters
    ----------
    hardware
        Built-in name (a100-sxm-80gb, b200-sxm, h100-sxm, h200-sxm) or a file.
    model
        Built-in name (deepseek-v3, llama-3.1-8b, llama-3.1-70b, qwen3-0.6b, qwen3-4b, qwen3-32b, qwen3-30b-a3b,
        qwen3-235b-a22b) or a file.
    set_
        Deployment field, key=value: ffn_cards, experts_per_card, precision, kv_bytes, activation_bytes, mtp_depth,
        link, shared_experts, overhead.attention, overhead.ffn, overhead.communication, memory_efficiency, …
    output
        File to write; default: print it.
    """
    from latency_models.hardware import load_hardware
    from latency_models.models import load_model
    from latency_models.roofline import derive, read_deployment
    from twin.scenarios.overrides import apply, single_settings

    deployment = read_deployment(apply({}, single_settings(set_ or [])), "deployment")
    _write(derive(load_hardware(hardware), load_model(model), deployment, "deployment"), output)
    return 0


@calibrate.command(name="import")
def import_(
    tables: Path,
    /,
    *,
    model: str | None = None,
    tensor_parallel: int = 1,
    weights: str = "float16",
    cache: str = "float16",
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
) -> int:
    """Kernel tables that others have measured, as one file that a scenario's step_time can name.

    A folder of LLMServingSim 2.0's profiler (dense.csv, attention.csv, …) becomes a file for source kernel_tables, with
    the ranges measured and the error at points left out. A folder of aiconfigurator's tables becomes the kernels of one
    model, for source aiconfigurator.

    Parameters
    ----------
    tables
        Folder of tables, gzipped or not.
    model
        Whose kernels to take from aiconfigurator's tables: built-in name or a file.
    tensor_parallel
        Ranks that share each layer (aiconfigurator).
    weights
        Format of the weights as the tables name it: float16, fp8, fp8_block, … (aiconfigurator).
    cache
        Format of the KV cache as the tables name it (aiconfigurator).
    output
        File to write; default: print it.
    """
    from latency_models.strict import write_yaml

    if any(tables.glob("gemm_perf*")):
        document = _aiconfigurator(tables, model, tensor_parallel, weights, cache)
    else:
        from latency_models.kernel_tables.files import read_kernel_tables

        document = read_kernel_tables(tables, describe=True).document()
    text = write_yaml(document)
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
    return 0


def _aiconfigurator(tables: Path, model: str | None, ranks: int, weights: str, cache: str) -> dict[str, Any]:
    from latency_models.aiconfigurator.kernels import ModelKernels, Placement
    from latency_models.models import load_model
    from workloads.errors import BadInput

    if model is None:
        raise BadInput("expected a model, since these tables are of many shapes", field="--model")
    placement = Placement(tensor_parallel=ranks, expert_tensor_parallel=ranks, weights=weights, cache=cache)
    return ModelKernels.load(tables, load_model(model), placement).document()


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
        What was measured, for the record.
    time_unit
        seconds or cycles.
    layers
        Say so when the times are of one layer, out of this many.
    relative
        Weigh errors in proportion to the time.
    output
        File to write; default: print it.
    """
    from latency_models.measurements import fit_calibration, read_measurements

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
    """Measure this machine: kernels by tokens and contexts, 4-bit layers, messages, and what a step costs the host.

    The file feeds a serving scenario (step_time: {source: calibration, path: …}), and an AFD scenario if communication
    was measured. A run that was killed is taken up by the same command. Exit code 4 if an operation's held-out median
    error is above what is allowed (5 %, or 10 % where the machine itself repeats worse than 5 %).

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
        A handful of points, to see that it runs.
    fresh
        Forget what a killed run has measured.
    no_figures
        Leave out the figures.
    json
        Print what each operation came to as JSON instead of the table.
    """
    from reports.calibration.table import operations_table
    from twin.cli.console import print_json, print_table, progress, require_at_least

    try:
        from live.calibration import running
    except ImportError as error:
        from workloads.errors import BadInput

        raise BadInput(f"expected serving-twin[live] to be installed: {error}", field="twin calibrate run") from None
    require_at_least("--threads", threads, 1)
    running.use_threads(device, threads)
    plan = running.make_plan(model, device, dtype, ops.split(",") if ops else None, quick=quick)
    journal = running.open_journal(plan, output, fresh=fresh)
    with progress("calibrate", running.count(plan), len(journal.entries), every=50) as advance:
        made = running.calibrate(plan, journal, output, advance)
    if not no_figures:
        _draw(running.pictures(plan, journal, made), output.with_name(f"{output.stem}-figures"))
    document = made.model_dump(mode="json", by_alias=True, exclude={"tables", "ec"}, exclude_none=True)
    if json:
        print_json(document)
    else:
        print_table(operations_table(document))
    return 0 if all(operation.holds for operation in made.operations.values()) else MISSED


MISSED = 4


def _draw(pictures: dict[str, dict[str, Any]], folder: Path) -> None:
    from reports.calibration.figures import operation_figure

    folder.mkdir(exist_ok=True)
    for name, picture in pictures.items():
        (folder / f"{name.replace('/', '-')}.svg").write_text(operation_figure(picture), encoding="utf-8")


def _write(calibration: Calibration, output: Path | None) -> None:
    text = calibration.to_yaml()
    if output is None:
        print(text, end="")
        return
    from reports.records.run_directory import naming

    with naming(output):
        output.write_text(text, encoding="utf-8")
