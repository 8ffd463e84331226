"""Options that several commands of `twin adapt` have: each field is a flag, and its docstring is the flag's help."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from twin.cli.options import Json
from workloads.errors import BadInput, missing_extra

if TYPE_CHECKING:
    from live.adaptation.compensation.runs import Budget, Job

SOURCES = Annotated[
    Path | None,
    Parameter(
        help="The text, in place of the standard library: a folder of .py, .txt and .md files; or a JSONL file with a"
        " `text`, or a `prompt` and an `answer`, on each line. A sixteenth is held out."
    ),
]

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
        from twin.api.arguments import require_at_least

        for name, (value, minimum) in (counts | {"seed": (self.seed, 0)}).items():
            require_at_least(f"--{name.replace('_', '-')}", value, minimum)
        try:
            from live.device import use_threads
        except ImportError as error:
            raise missing_extra("live", error) from None
        use_threads(self.threads, "--threads")


@Parameter(name="*")
@dataclass(frozen=True)
class QuantiserOptions:
    """Quantisation of a model."""

    method: Literal["rtn", "gptq", "awq"] = "rtn"
    """rtn: rounding to nearest. gptq and awq use text that the model writes itself."""

    bits: int = 4
    """4 or 3; twin adapt diagnose also 2."""

    group: int = -1
    """Inputs that share a scale: 128, or -1 for whole rows (per channel)."""

    sources: SOURCES = None

    sequences: int = 192
    """Self-sampled sequences of 128 tokens."""

    def job(self, model: Path, seed: int) -> Job:
        """The model to quantise and its texts. `sequences` must have been checked."""
        from live.adaptation.compensation.runs import Job
        from live.adaptation.quantisers.grid import Precision

        return Job(model, self.method, Precision(self.bits, self.group), self.sources, self.sequences, seed=seed)


@Parameter(name="*")
@dataclass(frozen=True)
class BudgetOptions:
    """Number and places of compensators."""

    full_rank: int = 8
    """The budget is half the bytes of compensators of this rank on all modules."""

    cost_weight: float = 0.1
    """Weight of the time that a compensator adds to a decode step, against the damage."""

    tables: Path | None = None
    """Kernel latencies (twin.ec-tables/1) for that time; default: those of this project's kernels on a CPU."""

    def budget(self) -> Budget:
        """The budget, checked."""
        from live.adaptation.compensation.runs import Budget
        from live.adaptation.compensation.selection import Rule

        if not self.cost_weight >= 0:
            raise BadInput("expected a number of at least 0", field="--cost-weight", value=self.cost_weight)
        return Budget(self.full_rank, Rule(cost_weight=self.cost_weight), self.tables)


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
    from reports.records.run_directory import write_text

    write_text(directory / "loss.svg", loss_figure(document))


def finish(document: dict[str, Any], lines: list[str], *, as_json: bool, directory: Path | None = None) -> int:
    """Print the result, and where the model is."""
    from twin.cli.console import note, print_json

    if as_json:
        print_json(document)
    else:
        print("\n".join(lines))
    if directory is not None:
        note(f"model directory: {directory}")
    return 0
