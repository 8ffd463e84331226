"""`twin adapt`: trains small models, and prefill modules for a shared decode module; measures and serves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App

from live.adaptation.options import Adaptation, Subject
from reports.run_directory import fingerprint, open_run
from twin.cli import COMMANDS
from twin.cli.adapt_text import (
    FLAGS,
    Sources,
    TorchOptions,
    compensate,
    diagnose,
    draw_losses,
    finish,
    quantise,
    resumable,
    text,
)
from twin.cli.console import FLAG, Json, note, print_result, progress
from workloads.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from scenarios.validation import ValidationScenario

adapt = App(name="adapt", help=COMMANDS["adapt"].summary)
for language_model_command in (text, quantise, diagnose, compensate):
    adapt.command(language_model_command)


@adapt.command
def base(
    directory: Path,
    /,
    *,
    size: Literal["reduced", "full"] = "reduced",
    family: Literal["llama", "qwen3"] = "llama",
    steps: int | None = None,
    options: TorchOptions = TorchOptions(),
) -> int:
    """Train a small model on eight sequence operations, and write it to a directory that `twin serve-live` loads.

    The directory also gets the losses (`training.json`, `loss.svg`) and the state of the training: the same command
    goes on where it was stopped.

    Args:
        directory: The model directory; made if need be.
        size: reduced: 2 layers of width 64, prompts of 4 digits (half a minute on an idle core). full: 4 layers of
            width 128, 8 digits (some minutes).
        family: The architecture.
        steps: Training steps, in place of the size's.
    """
    options.start(steps=(steps, 1))
    from live.adaptation.runs import run_base
    from live.adaptation.tasks import SIZES

    sizes = SIZES[size]
    if steps is not None:
        sizes = replace(sizes, base=replace(sizes.base, steps=steps))
    with resumable(directory), progress("training", sizes.base.steps, 0) as advance:
        document = run_base(directory, sizes, family, options.seed, advance)
    draw_losses(directory, document)
    return finish(document, _shares(document), as_json=options.json, directory=directory)


@adapt.command
def prefill(
    model: Path,
    directory: Path,
    /,
    *,
    adaptation: Annotated[Adaptation, FLAGS] = Adaptation(),
    options: TorchOptions = TorchOptions(),
) -> int:
    """Tune a prefill module for a task, against the frozen decode module of a base model.

    The same command goes on where it was stopped.

    Args:
        model: Directory of the base model, which is the decode module: any dense Llama or Qwen3 with a tokenizer for
            --data, one that `twin adapt base` has written for --task.
        directory: Directory of the tuned module; made if need be.
    """
    adaptation.check()
    options.start(steps=(adaptation.steps, 1), rank=(adaptation.rank, 1))
    from live.adaptation.runs import run_adaptation, settings_of

    steps = settings_of(model, adaptation).steps
    with resumable(directory), progress("training", steps, 0) as advance:
        document = run_adaptation(model, directory, adaptation, options.seed, advance)
    draw_losses(directory, document)
    return finish(document, _shares(document), as_json=options.json, directory=directory)


@adapt.command
def evaluate(
    *,
    prefill: Path,
    decode: Path,
    task: str | None = None,
    data: Path | None = None,
    bits: int | None = None,
    prompts: int = 1024,
    options: TorchOptions = TorchOptions(),
) -> int:
    """Measure the exact answers of a prefill module with a decode module, on prompts that no training draws.

    Args:
        prefill: Directory of the prefill module.
        decode: Directory of the decode module: the base model for SUN and naive sharing, the same as --prefill for one
            model.
        task: The operation.
        data: JSONL file as of `twin adapt prefill`, of which the held-out prompts are measured.
        bits: Round the decode module to 4 or 3 bits first.
        prompts: The number of prompts, at most.
    """
    subject = Subject(task, data)
    subject.check()
    options.start(prompts=(prompts, 1))
    from live.adaptation.runs import evaluate as measure

    document = measure(prefill, decode, subject, bits, prompts, options.seed)
    line = f"{document['task']}: {100 * document['exact_match']:.1f} % of {document['prompts']} answers are exact"
    return finish(document, [line + _of_tokens(document)], as_json=options.json)


@adapt.command
def serve(
    model: Path,
    /,
    *,
    module: Annotated[list[str], FLAG],
    bits: int | None = None,
    isolated: Annotated[bool, FLAG] = False,
    prompts: int = 256,
    concurrency: int = 32,
    seed: int = 0,
    json: Json = False,
) -> int:
    """Serve tuned modules over HTTP, and measure their answers and speed.

    A server starts with a prefill engine for each module and one decode engine for all. The prompts of all tasks are
    sent to it at once. Answers are compared with those of the training code.

    Args:
        model: Directory of the base model, which is the decode module.
        module: TASK=DIRECTORY, once for each tuned module; TASK is an operation, or the `.jsonl` file of `--data`.
        bits: Round the shared decode module to 4 or 3 bits.
        isolated: Each module decodes, too, on an engine of its own: for full fine-tuning.
        prompts: Prompts of each task.
        concurrency: Requests at a time.
        seed: Seed of the prompts.
    """
    if isolated and bits is not None:
        raise BadInput("expected none beside --isolated", field="--bits", value=bits)
    TorchOptions(seed).start(prompts=(prompts, 1), concurrency=(concurrency, 1))
    from live.adaptation.served import ServedModules, measure_served
    from reports.adaptation import served_report

    document = measure_served(ServedModules(model, _by_task(module), bits, isolated), prompts, concurrency, seed)
    print_result(document, served_report, as_json=json)
    return 0


def _by_task(modules: list[str]) -> dict[str, Path]:
    directories: dict[str, Path] = {}
    for entry in modules:
        task, separator, directory = entry.partition("=")
        if not (task and separator and directory) or task in directories:
            raise BadInput("expected TASK=DIRECTORY, each task once", field="--module", value=entry)
        directories[task] = Path(directory)
    return directories


def _shares(document: dict[str, Any]) -> list[str]:
    lines, measures = [], [name for name in ("token_accuracy", "perplexity") if name in document]
    for task, share in document["exact_match"].items():
        tokens = _of_tokens({name: document[name][task] for name in measures})
        lines.append(f"{task}: {100 * share:.1f} % of answers are exact{tokens}")
    return lines


def _of_tokens(measures: dict[str, Any]) -> str:
    """The end of a line about answers, with the measures of their tokens where there are any."""
    if "perplexity" not in measures:
        return ""
    return f", {100 * measures['token_accuracy']:.1f} % of tokens are right, perplexity {measures['perplexity']:.3f}"


SCHEMA = "twin.quality-and-latency/1"

SHOWN = ("tpot.mean", "ttft.mean", "output_throughput")
"""Metrics of a validation that are taken over."""

LONGEST = 240
"""Tokens of a profiled prompt and answer, at most; prompts of the workload have up to half, answers up to a quarter."""


@adapt.command
def measure(
    models: Annotated[list[Path], FLAG],
    /,
    *,
    load: float = 0.7,
    requests: int = 60,
    concurrency: int = 8,
    rounds: int = 20,
    sources: Sources = None,
    seed: int = 0,
    json: Json = False,
    runs: Path = Path("runs"),
) -> int:
    """Measure quality, memory and speed of language models, and predict the speed by the twin.

    The models are one model at several precisions: as `twin adapt text` writes it, and as `twin adapt quantise` and
    `twin adapt compensate` do. Each is served by one engine at a share of its own capacity. Time is the CPU time of the
    engine's own computation, on one thread. The twin's prediction is made beforehand, from a profile of the engine:
    each run folder has the whole comparison, as of `twin validate`.

    Args:
        models: Model directories; divergence is from the first.
        load: Requests per second, as a share of the engine's predicted capacity.
        requests: Requests of each of two repeats, at a load of 1.
        concurrency: Sequences of a batch, at most.
        rounds: Rounds of profiling.
        seed: Seed of the requests.
        runs: Parent of the run folders.
    """
    if not 0 < load < 1:
        raise BadInput("expected a number between 0 and 1", field="--load", value=load)
    TorchOptions(seed).start(requests=(requests, 4), concurrency=(concurrency, 1), rounds=(rounds, 10))
    from live.adaptation.compensation import text_quality
    from reports.adaptation import measured_report

    quality = text_quality(models, sources)
    rows = []
    for directory, row in zip(models, quality, strict=True):
        scenario = _scenario(directory, load, requests, concurrency, rounds, seed)
        rows.append({"model": str(directory), **row, **_latency(scenario, directory, runs, note)})
    document = {"schema": SCHEMA, "load": load, "concurrency": concurrency, "seed": seed, "models": rows}
    print_result(document, measured_report, as_json=json)
    return 0


def _scenario(
    directory: Path, load: float, requests: int, concurrency: int, rounds: int, seed: int
) -> ValidationScenario:
    """The validation of one engine that serves a model on one CPU thread."""
    from live.models.config import read_config
    from scenarios.validation import check_validation

    longest = min(LONGEST, read_config(directory).max_position_embeddings // 2)
    document = {
        "schema": "twin.scenario/1",
        "kind": "validation",
        "name": "adapt-measure",
        "seed": seed,
        "model": {"path": str(directory.resolve())},
        "workload": {
            "requests": requests,
            "prefill": {"distribution": "uniform", "low": longest // 30, "high": longest // 2},
            "decode": {"distribution": "uniform", "low": longest // 30, "high": longest // 4},
            "arrivals": {"process": "poisson"},
        },
        "engine": {"num_gpu_blocks": 1024, "max_num_seqs": concurrency, "max_num_batched_tokens": 128},
        "loads": [load],
        "repeats": 2,
        "profiling": {
            "rounds": rounds, "max_steps": 50, "max_prompt_tokens": longest, "max_output_tokens": longest,
        },
    }  # fmt: skip
    return check_validation(document, {}, directory / "scenario.yaml").on_device("cpu")


def _latency(scenario: ValidationScenario, directory: Path, runs: Path, note: Callable[[str], None]) -> dict[str, Any]:
    """Measured and predicted metrics of an engine, and its predicted capacity in requests per second."""
    from live.validation.backend import LiveBackend, model_source
    from twin.api.run_folder import complete, manifest
    from twin.validation.profiling import contention
    from twin.validation.run import EngineValidation

    engine = LiveBackend(model_source(scenario.model, directory, scenario.seed), clock="direct")
    described = scenario.model_dump(mode="json", by_alias=True)
    content = manifest({"scenarios": [described]})
    paths = sorted([*directory.glob("*.safetensors"), directory / "config.json"])
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    identity = fingerprint([described, content["version"], files])
    with open_run(runs, "adapt-measure", identity, content, resume=True) as run:
        document = EngineValidation(engine, scenario, directory, None, run, note).document()
        document |= {"missed": [], "tolerance": 1.0, "contention": contention(run.points().values())}
        document = complete(run, document, figures=True)
    metrics = document["loads"][0]["metrics"]
    rows = {name: {key: metrics[name][key] for key in ("measured", "predicted", "error")} for name in SHOWN}
    return {"capacity": document["capacity"], "metrics": rows, "run": document["run"]}
