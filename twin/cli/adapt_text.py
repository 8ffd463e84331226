"""`twin adapt text`, `quantise`, `diagnose` and `compensate`: quantised language models and error compensation.

What the commands of `twin adapt` have in common is here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from live.adaptation.options import Budget, Quantisation
from reports.run_directory import write_text
from twin.cli.console import Json, note, print_json, progress
from workloads.errors import missing_extra

FLAGS = Parameter(name="*")
"""Each field of an option's class is a flag, and its docstring the flag's help."""

Sources = Annotated[Path | None, Parameter(help=(
    "The text, in place of the standard library: a folder of .py, .txt and .md files; or a JSONL file with a `text`, or"
    " a `prompt` and an `answer`, on each line. A sixteenth is held out."))]  # fmt: skip

STATE = "training.safetensors"
"""The file of a training's state, as `live.adaptation` names it."""


@Parameter(name="*")
@dataclass(frozen=True)
class TorchOptions:
    """Options of every computation."""

    seed: int = 0
    """Seed of weights, data and prompts."""

    threads: int = 1
    """CPU threads. Results of other numbers of threads may differ in the last bits."""

    json: Json = False

    def start(self, **counts: tuple[int | None, int]) -> None:
        """Check these and other options, and give torch its threads.

        Args:
            counts: values of other options, each with the least that it may be.
        """
        from twin.api.inputs import require_at_least

        for name, (value, minimum) in (counts | {"seed": (self.seed, 0)}).items():
            require_at_least(f"--{name.replace('_', '-')}", value, minimum)
        try:
            from live.device import use_threads
        except ImportError as error:
            raise missing_extra("live", error) from None
        use_threads(self.threads, "--threads")


@contextlib.contextmanager
def resumable(directory: Path) -> Iterator[None]:
    """Give an interruption of the block a message that says what the directory keeps."""
    try:
        yield
    except KeyboardInterrupt:
        state = directory / STATE
        note = f"the state of the training is kept in {state}, and the same command goes on there"
        raise KeyboardInterrupt(note if state.exists() else "") from None


def draw_losses(directory: Path, document: dict[str, Any]) -> None:
    """Draw the losses of a training into its directory."""
    from reports.adaptation import loss_figure

    write_text(directory / "loss.svg", loss_figure(document))


def finish(document: dict[str, Any], lines: list[str], *, as_json: bool, directory: Path | None = None) -> int:
    """Print the result, and where the model is."""
    if as_json:
        print_json(document)
    else:
        print("\n".join(lines))
    if directory is not None:
        note(f"model directory: {directory}")
    return 0


ROWS = (("16 bits", "full"), ("quantised", "quantised"), ("compensated", "compensated"))


def text(
    directory: Path,
    /,
    *,
    size: Literal["reduced", "full"] = "reduced",
    family: Literal["llama", "qwen3"] = "llama",
    steps: int | None = None,
    sources: Sources = None,
    options: TorchOptions = TorchOptions(),
) -> int:
    """Train a small language model on Python's standard library, and write it to a directory with its tokenizer.

    One file in sixteen is held out. The same command goes on where it was stopped.

    Args:
        directory: The model directory; made if need be.
        size: reduced: 0.6 million parameters, a token for each byte (two minutes on an idle core). full: 4 million,
            2048 byte pairs.
        family: The architecture.
        steps: Training steps, in place of the size's.
    """
    options.start(steps=(steps, 1))
    from live.adaptation.language_model import TEXT_SIZES, train_text_model

    sizes = TEXT_SIZES[size]
    if steps is not None:
        sizes = replace(sizes, training=replace(sizes.training, steps=steps))
    with resumable(directory), progress("training", sizes.training.steps, 0) as advance:
        document = train_text_model(directory, sizes, family, options.seed, text=sources, advance=advance).document
    draw_losses(directory, document)
    line = f"{document['corpus']['description']}: perplexity {document['perplexity']:.3f} on held-out files"
    return finish(document, [line], as_json=options.json, directory=directory)


def quantise(
    model: Path,
    directory: Path,
    /,
    *,
    quantiser: Annotated[Quantisation, FLAGS] = Quantisation(),
    options: TorchOptions = TorchOptions(),
) -> int:
    """Quantise a model, and write it to a directory that `twin serve-live` loads.

    Args:
        model: Directory of a dense model with its tokenizer.
        directory: Directory of the quantised model; made if need be.
    """
    options.start(sequences=(quantiser.sequences, 4))
    from live.adaptation import compensation

    document = compensation.quantise(compensation.Job(model, quantiser, seed=options.seed), directory)
    return finish(document, _qualities(document), as_json=options.json, directory=directory)


def diagnose(
    model: Path,
    /,
    *,
    figure: Path | None = None,
    quantiser: Annotated[Quantisation, FLAGS] = Quantisation(),
    compensators: Annotated[Budget, FLAGS] = Budget(),
    options: TorchOptions = TorchOptions(),
) -> int:
    """Measure by CKA which modules quantisation damages, and where error compensators would be placed (SPEAR).

    Args:
        model: Directory of a dense model with its tokenizer.
        figure: File for the map of the damage, SVG.
    """
    compensators.check()
    options.start(sequences=(quantiser.sequences, 4), full_rank=(compensators.full_rank, 1))
    from live.adaptation import compensation
    from reports.adaptation import damage_figure

    document = compensation.diagnose(compensation.Job(model, quantiser, seed=options.seed), compensators)
    if figure is not None:
        write_text(figure, damage_figure(document))
    lines = [
        f"{name}: {value:.3e}" + (" compensated" if name in document["modules"] else "")
        for name, value in sorted(document["damage"].items(), key=lambda pair: -pair[1])
    ]
    return finish(document, [*lines, _placement(document)], as_json=options.json)


def compensate(
    model: Path,
    directory: Path,
    /,
    *,
    placement: Literal["cka", "all"] = "cka",
    steps: int = 150,
    gate_steps: int = 100,
    quantiser: Annotated[Quantisation, FLAGS] = Quantisation(),
    compensators: Annotated[Budget, FLAGS] = Budget(),
    options: TorchOptions = TorchOptions(),
) -> int:
    """Quantise a model and train error compensators for it (SPEAR), in a directory that `twin serve-live` loads.

    Args:
        model: Directory of a dense model with its tokenizer.
        directory: Directory of the compensated model; made if need be.
        placement: cka: on the modules that `twin adapt diagnose` finds. all: on every module, with twice the memory.
        steps: Steps that train the factors A and B.
        gate_steps: Steps that train the gate after that.
    """
    compensators.check()
    counts = {"steps": steps, "gate_steps": gate_steps, "full_rank": compensators.full_rank}
    options.start(**{name: (value, 1) for name, value in counts.items()}, sequences=(quantiser.sequences, 4))
    from live.adaptation import compensation

    job, phases = compensation.Job(model, quantiser, seed=options.seed), (steps, gate_steps)
    with progress("training", sum(phases), 0) as advance:
        document = compensation.compensate(job, directory, compensators, placement, phases, advance)
    return finish(document, _qualities(document), as_json=options.json, directory=directory)


def _placement(document: dict[str, Any]) -> str:
    return (
        f"{len(document['modules'])} of {len(document['damage'])} modules, rank {document['rank']}:"
        f" {document['bytes']:,} bytes, {100 * document['share']:.1f} % of the quantised layers"
        f" ({100 * document['share_llama_2_7b']:.2f} % at Llama-2-7B's shapes)"
    )


def _qualities(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}: perplexity {document[row]['perplexity']:.3f}, KL {document[row]['kl']:.4f} nats"
        for name, row in ROWS
        if row in document
    ]
    if "recovered" in document:
        lines += [_placement(document), f"{100 * document['recovered']:.1f} % of the gap recovered"]
    return lines
