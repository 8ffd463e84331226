"""`twin adapt`: trains small models, and prefill modules for a shared decode module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from workloads.errors import BadInput

if TYPE_CHECKING:
    from live.adaptation.sizes import Size

FLAG = Parameter(negative=())

adapt = App(
    name="adapt",
    help="Train a base model, and prefill modules that a frozen decode module serves (SUN). Needs the extra [live].",
)


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
    sizes = _sizes(threads)[size]
    if steps is not None:
        sizes = replace(sizes, base=replace(sizes.base, steps=steps))
    from live.adaptation.runs import run_base
    from twin.cli.console import progress

    with _resumable(directory), progress("training", sizes.base.steps, 0) as advance:
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
    _sizes(threads)
    from live.adaptation.runs import Adaptation, run_adaptation
    from twin.cli.console import progress

    chosen = Adaptation(model, task, method, scope, rank, bits, start, steps, learning_rate, seed)
    with _resumable(directory), progress("training", chosen.settings().steps, 0) as advance:
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
    _sizes(threads)
    from live.adaptation.runs import evaluate as measure

    document = measure(prefill, decode, task, bits, prompts, seed)
    if json:
        print_json(document)
    else:
        print(f"{task}: {100 * document['exact_match']:.1f} % of {prompts} answers are exact")
    return 0


def _sizes(threads: int) -> dict[str, Size]:
    """The sizes, once torch is there and uses its threads.

    Raises:
        BadInput: torch is not installed, or too many threads.
    """
    try:
        from live.adaptation.sizes import SIZES
        from live.device import use_threads
    except ImportError as error:
        raise BadInput(f"expected the extra [live] to be installed ({error})") from None
    use_threads(threads, "--threads")
    return SIZES


@contextlib.contextmanager
def _resumable(directory: Path) -> Iterator[None]:
    """Give an interruption of the block a message that says what the directory keeps."""
    try:
        yield
    except KeyboardInterrupt:
        from live.adaptation.runs import STATE

        state = directory / STATE
        kept = f"the state of the training is kept in {state}, and the same command goes on there"
        raise KeyboardInterrupt(kept if state.exists() else "") from None


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
