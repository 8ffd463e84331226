"""`twin adapt text`, `quantise`, `diagnose` and `compensate`: quantised language models and error compensation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from twin.cli.adapt_options import (
    SOURCES,
    BudgetOptions,
    QuantiserOptions,
    TorchOptions,
    draw_losses,
    finish,
    resumable,
)

ROWS = (("16 bits", "full"), ("quantised", "quantised"), ("compensated", "compensated"))


def text(
    directory: Path,
    /,
    *,
    size: Literal["reduced", "full"] = "reduced",
    family: Literal["llama", "qwen3"] = "llama",
    steps: int | None = None,
    sources: SOURCES = None,
    options: TorchOptions = TorchOptions(),  # noqa: B008 (frozen)
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
    from live.adaptation.sizes import TEXT_SIZES
    from live.adaptation.text.language_model import train_text_model
    from twin.cli.console import progress

    sizes = TEXT_SIZES[size]
    if steps is not None:
        sizes = replace(sizes, training=replace(sizes.training, steps=steps))
    with resumable(directory), progress("training", sizes.training.steps, 0) as advance:
        _, document = train_text_model(directory, sizes, family, options.seed, text=sources, advance=advance)
    draw_losses(directory, document)
    line = f"{document['corpus']['description']}: perplexity {document['perplexity']:.3f} on held-out files"
    return finish(document, [line], as_json=options.json, directory=directory)


def quantise(
    model: Path,
    directory: Path,
    /,
    *,
    quantiser: QuantiserOptions = QuantiserOptions(),  # noqa: B008 (frozen)
    options: TorchOptions = TorchOptions(),  # noqa: B008 (frozen)
) -> int:
    """Quantise a model, and write it to a directory that `twin serve-live` loads.

    Args:
        model: Directory of a dense model with its tokenizer.
        directory: Directory of the quantised model; made if need be.
    """
    options.start(sequences=(quantiser.sequences, 4))
    from live.adaptation.compensation import runs

    document = runs.quantise(quantiser.job(model, options.seed), directory)
    return finish(document, _qualities(document), as_json=options.json, directory=directory)


def diagnose(
    model: Path,
    /,
    *,
    figure: Path | None = None,
    quantiser: QuantiserOptions = QuantiserOptions(),  # noqa: B008 (frozen)
    compensators: BudgetOptions = BudgetOptions(),  # noqa: B008 (frozen)
    options: TorchOptions = TorchOptions(),  # noqa: B008 (frozen)
) -> int:
    """Measure by CKA which modules quantisation damages, and where error compensators would be placed (SPEAR).

    Args:
        model: Directory of a dense model with its tokenizer.
        figure: File for the map of the damage, SVG.
    """
    options.start(sequences=(quantiser.sequences, 4), full_rank=(compensators.full_rank, 1))
    from live.adaptation.compensation import runs
    from reports.adaptation import damage_figure
    from reports.records.run_directory import write_text

    document = runs.diagnose(quantiser.job(model, options.seed), compensators.budget())
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
    quantiser: QuantiserOptions = QuantiserOptions(),  # noqa: B008 (frozen)
    compensators: BudgetOptions = BudgetOptions(),  # noqa: B008 (frozen)
    options: TorchOptions = TorchOptions(),  # noqa: B008 (frozen)
) -> int:
    """Quantise a model and train error compensators for it (SPEAR), in a directory that `twin serve-live` loads.

    Args:
        model: Directory of a dense model with its tokenizer.
        directory: Directory of the compensated model; made if need be.
        placement: cka: on the modules that `twin adapt diagnose` finds. all: on every module, with twice the memory.
        steps: Steps that train the factors A and B.
        gate_steps: Steps that train the gate after that.
    """
    counts = {"steps": steps, "gate_steps": gate_steps, "full_rank": compensators.full_rank}
    options.start(**{name: (value, 1) for name, value in counts.items()}, sequences=(quantiser.sequences, 4))
    from live.adaptation.compensation import runs
    from twin.cli.console import progress

    job, budget, settings = (
        quantiser.job(model, options.seed),
        compensators.budget(),
        runs.settings_of(steps, gate_steps),
    )
    with progress("training", steps + gate_steps, 0) as advance:
        document = runs.compensate(job, directory, budget, placement, settings, advance)
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
