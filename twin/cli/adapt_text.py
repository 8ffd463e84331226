"""`twin adapt text`, `quantise`, `diagnose` and `compensate`: language models in few bits, and what makes up for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from twin.cli.trainings import FLAG, resumable
from workloads.errors import BadInput, missing_extra

if TYPE_CHECKING:
    from live.adaptation.compensation.runs import Budget, Job


def text(
    directory: Path,
    /,
    *,
    size: Literal["reduced", "full"] = "reduced",
    family: Literal["llama", "qwen3"] = "llama",
    steps: int | None = None,
    sources: Path | None = None,
    seed: int = 0,
    threads: int = 1,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Train a small language model on Python's standard library, and write it to a directory with its tokenizer.

    One file in sixteen is held out. The same command goes on where it was stopped.

    Parameters
    ----------
    directory
        The model directory; made if need be.
    size
        reduced: 0.6 million parameters, a token for each byte (two minutes on an idle core). full: 4 million, 2048 byte
        pairs.
    family
        The architecture.
    steps
        Training steps, in place of the size's.
    sources
        Folder whose Python files are the text, in place of the standard library.
    seed
        Seed of weights and data.
    threads
        CPU threads. Results of other numbers of threads may differ in the last bits.
    json
        Print one JSON document on stdout and nothing else there.
    """
    _check(threads, {"--steps": (steps, 1), "--seed": (seed, 0)})
    from live.adaptation.text.runs import train_text_model
    from live.adaptation.text.sizes import TEXT_SIZES
    from reports.adaptation.figures import loss_figure
    from reports.records.run_directory import write_text
    from twin.cli.console import note, print_json, progress

    chosen = TEXT_SIZES[size]
    if steps is not None:
        chosen = replace(chosen, training=replace(chosen.training, steps=steps))
    with resumable(directory), progress("training", chosen.training.steps, 0) as advance:
        _, document = train_text_model(directory, chosen, family, seed, text=sources, advance=advance)
    write_text(directory / "loss.svg", loss_figure(document))
    if json:
        print_json(document)
    else:
        print(f"{document['corpus']['description']}: perplexity {document['perplexity']:.3f} on held-out files")
    note(f"model directory: {directory}")
    return 0


def quantise(
    model: Path,
    directory: Path,
    /,
    *,
    method: Literal["rtn", "gptq", "awq"] = "rtn",
    bits: int = 4,
    group: int = -1,
    sources: Path | None = None,
    sequences: int = 192,
    seed: int = 0,
    threads: int = 1,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Quantise a model, and write it to a directory that `twin serve-live` loads.

    Parameters
    ----------
    model
        Directory of a dense model with its tokenizer.
    directory
        Directory of the quantised model; made if need be.
    method
        rtn: rounding to nearest. gptq and awq use text that the model writes itself.
    bits
        4 or 3.
    group
        Inputs that share a scale: 128, or -1 for whole rows (per channel).
    sources
        Folder whose held-out Python files are the evaluation text, in place of the standard library.
    sequences
        Self-sampled sequences of 128 tokens.
    seed
        Seed of the sampling.
    threads
        CPU threads.
    json
        Print one JSON document on stdout and nothing else there.
    """
    job = _job(model, method, bits, group, sources, sequences, seed, threads)
    from live.adaptation.compensation import runs

    return _finish(runs.quantise(job, directory), directory, as_json=json)


def diagnose(
    model: Path,
    /,
    *,
    method: Literal["rtn", "gptq", "awq"] = "rtn",
    bits: int = 4,
    group: int = -1,
    full_rank: int = 8,
    cost_weight: float = 0.1,
    tables: Path | None = None,
    figure: Path | None = None,
    sources: Path | None = None,
    sequences: int = 192,
    seed: int = 0,
    threads: int = 1,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Measure by CKA which modules quantisation damages, and where error compensators would be placed (SPEAR).

    Parameters
    ----------
    model
        Directory of a dense model with its tokenizer.
    method
        rtn, gptq or awq.
    bits
        4, 3 or 2.
    group
        Inputs that share a scale: 128, or -1 for whole rows (per channel).
    full_rank
        The budget is half the bytes of compensators of this rank on all modules.
    cost_weight
        Weight of the time that a compensator adds to a decode step, against the damage.
    tables
        Kernel latencies (twin.ec-tables/1) for that time; default: those of this project's kernels on a CPU.
    figure
        File for the map of the damage, SVG.
    sources
        Folder whose held-out Python files are the evaluation text, in place of the standard library.
    sequences
        Self-sampled sequences of 128 tokens.
    seed
        Seed of the sampling.
    threads
        CPU threads.
    json
        Print one JSON document on stdout and nothing else there.
    """
    job = _job(model, method, bits, group, sources, sequences, seed, threads)
    budget = _budget(full_rank, cost_weight, tables)
    from live.adaptation.compensation import runs
    from reports.adaptation.figures import damage_figure
    from reports.records.run_directory import write_text
    from twin.cli.console import print_json

    document = runs.diagnose(job, budget)
    if figure is not None:
        write_text(figure, damage_figure(document))
    if json:
        print_json(document)
    else:
        for name, value in sorted(document["damage"].items(), key=lambda pair: -pair[1]):
            print(f"{name}: {value:.3e}" + (" compensated" if name in document["modules"] else ""))
        print(_placement(document))
    return 0


def compensate(
    model: Path,
    directory: Path,
    /,
    *,
    method: Literal["rtn", "gptq", "awq"] = "rtn",
    bits: int = 4,
    group: int = -1,
    placement: Literal["cka", "all"] = "cka",
    full_rank: int = 8,
    cost_weight: float = 0.1,
    tables: Path | None = None,
    steps: int = 150,
    gate_steps: int = 100,
    sources: Path | None = None,
    sequences: int = 192,
    seed: int = 0,
    threads: int = 1,
    json: Annotated[bool, FLAG] = False,
) -> int:
    """Quantise a model and train error compensators for it (SPEAR), in a directory that `twin serve-live` loads.

    Parameters
    ----------
    model
        Directory of a dense model with its tokenizer.
    directory
        Directory of the compensated model; made if need be.
    method
        rtn, gptq or awq.
    bits
        4 or 3.
    group
        Inputs that share a scale: 128, or -1 for whole rows (per channel).
    placement
        cka: on the modules that `twin adapt diagnose` finds. all: on every module, with twice the memory.
    full_rank
        The budget is half the bytes of compensators of this rank on all modules.
    cost_weight
        Weight of the time that a compensator adds to a decode step, against the damage.
    tables
        Kernel latencies (twin.ec-tables/1) for that time; default: those of this project's kernels on a CPU.
    steps
        Steps that train the factors A and B.
    gate_steps
        Steps that train the gate after that.
    sources
        Folder whose held-out Python files are the evaluation text, in place of the standard library.
    sequences
        Self-sampled sequences of 128 tokens.
    seed
        Seed of sampling and training.
    threads
        CPU threads.
    json
        Print one JSON document on stdout and nothing else there.
    """
    _check(threads, {"--steps": (steps, 1), "--gate-steps": (gate_steps, 1)})
    job = _job(model, method, bits, group, sources, sequences, seed, threads)
    budget = _budget(full_rank, cost_weight, tables)
    from live.adaptation.compensation import runs
    from twin.cli.console import progress

    settings = runs.settings_of(steps, gate_steps)
    with progress("training", steps + gate_steps, 0) as advance:
        document = runs.compensate(job, directory, budget, placement, settings, advance)
    return _finish(document, directory, as_json=json)


def use_torch(threads: int) -> None:
    """Give torch its threads.

    Raises:
        BadInput: torch is not installed, or too many threads.
    """
    try:
        from live.device import use_threads
    except ImportError as error:
        raise missing_extra("live", error) from None
    use_threads(threads, "--threads")


def _check(threads: int, least: dict[str, tuple[int | None, int]]) -> None:
    """Check counts, and that torch is there; sets its threads.

    Raises:
        BadInput: a count below its least value, torch is not installed, or too many threads.
    """
    from twin.api.arguments import require_at_least

    for option, (value, lowest) in least.items():
        require_at_least(option, value, lowest)
    use_torch(threads)


def _job(
    model: Path,
    method: Literal["rtn", "gptq", "awq"],
    bits: int,
    group: int,
    sources: Path | None,
    sequences: int,
    seed: int,
    threads: int,
) -> Job:
    """The model to quantise and its texts, checked."""
    _check(threads, {"--sequences": (sequences, 4), "--seed": (seed, 0)})
    from live.adaptation.compensation.runs import Job
    from live.adaptation.quantisers.grid import Precision

    return Job(model, method, Precision(bits, group), sources, sequences, seed=seed)


def _budget(full_rank: int, cost_weight: float, tables: Path | None) -> Budget:
    """The budget of compensators, checked."""
    from live.adaptation.compensation.runs import Budget
    from live.adaptation.compensation.selection import Rule
    from twin.api.arguments import require_at_least

    require_at_least("--full-rank", full_rank, 1)
    if not cost_weight >= 0:
        raise BadInput("expected a number of at least 0", field="--cost-weight", value=cost_weight)
    return Budget(full_rank, Rule(cost_weight=cost_weight), tables)


def _placement(document: dict[str, Any]) -> str:
    """One line about a placement."""
    return (
        f"{len(document['modules'])} of {len(document['damage'])} modules, rank {document['rank']}:"
        f" {document['bytes']:,} bytes, {100 * document['share']:.1f} % of the quantised layers"
        f" ({100 * document['share_llama_2_7b']:.2f} % at Llama-2-7B's shapes)"
    )


def _finish(document: dict[str, Any], directory: Path, *, as_json: bool) -> int:
    """Print perplexities, and where the model is."""
    from twin.cli.console import note, print_json

    if as_json:
        print_json(document)
    else:
        for name, row in (("16 bits", "full"), ("quantised", "quantised"), ("compensated", "compensated")):
            if row in document:
                print(f"{name}: perplexity {document[row]['perplexity']:.3f}, KL {document[row]['kl']:.4f} nats")
        if "recovered" in document:
            print(_placement(document))
            print(f"{100 * document['recovered']:.1f} % of the gap recovered")
    note(f"model directory: {directory}")
    return 0
