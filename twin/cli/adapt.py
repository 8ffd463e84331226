"""`twin adapt`: trains small models, and prefill modules for a shared decode module. See also `adapt_text`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App

from twin.cli.adapt_measure import measure
from twin.cli.adapt_text import compensate, diagnose, quantise, text, use_torch
from twin.cli.commands import COMMANDS
from twin.cli.trainings import FLAG, resumable
from workloads.errors import BadInput

adapt = App(name="adapt", help=COMMANDS["adapt"].summary)
for language_model_command in (text, quantise, diagnose, compensate, measure):
    adapt.command(language_model_command)


@adapt.command
def base(
    directory: Path,
    /,
    *,
    size: Literal["reduced", "full"] = "reduced",
    family: Literal["llama", "qwen3"] = "llama",
    steps: int | None = None,
    seed: int = 0,
    threads: int = 1,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Train a small model on eight sequence operations, and write it to a directory that `twin serve-live` loads.

    The directory also gets the losses (`training.json`, `loss.svg`) and the state of the training: the same command
    goes on where it was stopped.

    Parameters
    ----------
    directory
        The model directory; made if need be.
    size
        reduced: 2 layers of width 64, prompts of 4 digits (half a minute on an idle core). full: 4 layers of width
        128, 8 digits (some minutes).
    family
        The architecture.
    steps
        Training steps, in place of the size's.
    seed
        Seed of weights and data.
    threads
        CPU threads. Results of other numbers of threads may differ in the last bits.
    json
        Print one JSON document on stdout and nothing else there.
    """
    from twin.api.arguments import require_at_least

    require_at_least("--steps", steps, 1)
    require_at_least("--seed", seed, 0)
    use_torch(threads)
    from live.adaptation.sizes import SIZES

    sizes = SIZES[size]
    if steps is not None:
        sizes = replace(sizes, base=replace(sizes.base, steps=steps))
    from live.adaptation.runs import run_base
    from twin.cli.console import progress

    with resumable(directory), progress("training", sizes.base.steps, 0) as advance:
        document = run_base(directory, sizes, family, seed, advance)
    return _finish(directory, document, as_json=json)


@adapt.command
def prefill(
    model: Path,
    directory: Path,
    /,
    *,
    task: str,
    method: Literal["sun", "full"] = "sun",
    scope: Literal["all", "attention", "low_rank"] = "all",
    rank: int = 8,
    bits: int | None = None,
    start: Path | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
    threads: int = 1,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Tune a prefill module for a task, against the frozen decode module of a base model.

    The same command goes on where it was stopped.

    Parameters
    ----------
    model
        Directory of the base model, which is the decode module, written by `twin adapt base`.
    directory
        Directory of the tuned module; made if need be.
    task
        The operation to learn: reverse_add_one, sort_add_three, running_sum, negate_rotate, or one of the base's own.
    method
        sun: tune the prefill module only. full: full fine-tuning, in which prefill and decode are the tuned weights.
    scope
        sun: what is tuned. attention: its matrices and norms. low_rank: a term of --rank for each linear layer.
    rank
        The rank of low_rank.
    bits
        sun: round the decode module to 4 or 3 bits first (QSUN).
    start
        Directory of a tuned prefill module to begin with, as QSUN's re-tuning does; default: the base model.
    steps
        Training steps, in place of the size's.
    learning_rate
        The highest learning rate, in place of the size's.
    seed
        Seed of the data.
    threads
        CPU threads. Results of other numbers of threads may differ in the last bits.
    json
        Print one JSON document on stdout and nothing else there.
    """
    from twin.api.arguments import require_at_least

    for option, value, least in (("--steps", steps, 1), ("--rank", rank, 1), ("--seed", seed, 0)):
        require_at_least(option, value, least)
    if method == "full" and (bits is not None or scope != "all"):
        field, found = ("--bits", str(bits)) if bits is not None else ("--scope", scope)
        raise BadInput("expected it with --method sun only", field=field, value=found)
    if learning_rate is not None and not learning_rate > 0:
        raise BadInput("expected a number above 0", field="--learning-rate", value=learning_rate)
    use_torch(threads)
    from live.adaptation.runs import Adaptation, run_adaptation
    from twin.cli.console import progress

    chosen = Adaptation(model, task, method, scope, rank, bits, start, steps, learning_rate, seed)
    with resumable(directory), progress("training", chosen.settings().steps, 0) as advance:
        document = run_adaptation(directory, chosen, advance)
    return _finish(directory, document, as_json=json)


@adapt.command
def evaluate(
    *,
    prefill: Path,
    decode: Path,
    task: str,
    bits: int | None = None,
    prompts: int = 1024,
    seed: int = 0,
    threads: int = 1,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Measure the exact answers of a prefill module with a decode module, on prompts that no training draws.

    Parameters
    ----------
    prefill
        Directory of the prefill module.
    decode
        Directory of the decode module: the base model for SUN and naive sharing, the same as --prefill for one model.
    task
        The operation.
    bits
        Round the decode module to 4 or 3 bits first.
    prompts
        The number of prompts.
    seed
        Seed of the prompts.
    threads
        CPU threads.
    json
        Print one JSON document on stdout and nothing else there.
    """
    from twin.api.arguments import require_at_least
    from twin.cli.console import print_json

    require_at_least("--prompts", prompts, 1)
    require_at_least("--seed", seed, 0)
    use_torch(threads)
    from live.adaptation.runs import evaluate as measure

    document = measure(prefill, decode, task, bits, prompts, seed)
    if json:
        print_json(document)
    else:
        print(f"{task}: {100 * document['exact_match']:.1f} % of {prompts} answers are exact")
    return 0


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
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Serve tuned modules over HTTP, and measure their answers and speed.

    A server starts with a prefill engine for each module and one decode engine for all. The prompts of all tasks are
    sent to it at once. Answers are compared with those of the training code.

    Parameters
    ----------
    model
        Directory of the base model, which is the decode module.
    module
        TASK=DIRECTORY, once for each tuned module.
    bits
        Round the shared decode module to 4 or 3 bits.
    isolated
        Each module decodes, too, on an engine of its own: for full fine-tuning.
    prompts
        Prompts of each task.
    concurrency
        Requests at a time.
    seed
        Seed of the prompts.
    json
        Print one JSON document on stdout and nothing else there.
    """
    from twin.api.arguments import require_at_least
    from twin.cli.console import print_json

    for option, value in (("--prompts", prompts), ("--concurrency", concurrency)):
        require_at_least(option, value, 1)
    require_at_least("--seed", seed, 0)
    if isolated and bits is not None:
        raise BadInput("expected none beside --isolated", field="--bits", value=bits)
    use_torch(1)
    from live.adaptation.served import ServedModules, measure_served
    from reports.adaptation.served_table import served_table

    document = measure_served(ServedModules(model, _by_task(module), bits, isolated), prompts, concurrency, seed)
    if json:
        print_json(document)
    else:
        print(served_table(document))
    return 0


def _by_task(modules: list[str]) -> dict[str, Path]:
    """TASK=DIRECTORY by task.

    Raises:
        BadInput: something else, or a task twice.
    """
    found: dict[str, Path] = {}
    for entry in modules:
        task, separator, directory = entry.partition("=")
        if not (task and separator and directory) or task in found:
            raise BadInput("expected TASK=DIRECTORY, each task once", field="--module", value=entry)
        found[task] = Path(directory)
    return found


def _finish(directory: Path, document: dict[str, Any], *, as_json: bool) -> int:
    """Draw the losses into the directory and print the result."""
    from reports.adaptation.figures import loss_figure
    from reports.records.run_directory import write_text
    from twin.cli.console import note, print_json

    write_text(directory / "loss.svg", loss_figure(document))
    if as_json:
        print_json(document)
    else:
        for task, share in document["exact_match"].items():
            print(f"{task}: {100 * share:.1f} % of answers are exact")
    note(f"model directory: {directory}")
    return 0
