"""Options of `twin adapt`, each field with its help; computations take them as they are. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workloads.errors import BadInput


@dataclass(frozen=True)
class Subject:
    """The task of a module: a sequence operation, or prompts and answers of one's own."""

    task: str | None = None
    """The operation to learn: reverse_add_one, sort_add_three, running_sum, negate_rotate, or one of the base's own."""

    data: Path | None = None
    """JSONL file with a `prompt` and an `answer` on each line; one prompt in sixteen is held out."""

    @property
    def name(self) -> str:
        return str(self.task if self.data is None else self.data)

    def check(self) -> None:
        if (self.task is None) == (self.data is None):
            raise BadInput("expected it or --data, one of them", field="--task", value=self.task)


@dataclass(frozen=True)
class Adaptation(Subject):
    """One fine-tuning."""

    method: Literal["sun", "full"] = "sun"
    """sun: tune the prefill module only. full: full fine-tuning, in which prefill and decode are the tuned weights."""

    scope: Literal["all", "attention", "low_rank"] = "all"
    """sun: what is tuned. attention: its matrices and norms. low_rank: a term of --rank for each linear layer."""

    rank: int = 8
    """The rank of low_rank."""

    bits: int | None = None
    """sun: round the decode module to 4 or 3 bits first (QSUN)."""

    start: Path | None = None
    """Directory of a tuned prefill module to begin with, as QSUN's re-tuning does; default: the base model."""

    steps: int | None = None
    """Training steps, in place of the size's; with --data 200 of 8 pairs."""

    learning_rate: float | None = None
    """The highest learning rate, in place of the size's; with --data 5e-5."""

    def check(self) -> None:
        if self.method == "full" and (self.bits is not None or self.scope != "all"):
            field, value = ("--bits", str(self.bits)) if self.bits is not None else ("--scope", self.scope)
            raise BadInput("expected it with --method sun only", field=field, value=value)
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise BadInput("expected a number above 0", field="--learning-rate", value=self.learning_rate)
        super().check()


@dataclass(frozen=True)
class Quantisation:
    """Quantisation of a model."""

    method: Literal["rtn", "gptq", "awq"] = "rtn"
    """rtn: rounding to nearest. gptq and awq use text that the model writes itself."""

    bits: int = 4
    """4 or 3; twin adapt diagnose also 2."""

    group: int = -1
    """Inputs that share a scale: 128, or -1 for whole rows (per channel)."""

    sources: Path | None = None
    """The text, in place of the standard library: a folder of .py, .txt and .md files; or a JSONL file with a `text`,
    or a `prompt` and an `answer`, on each line. A sixteenth is held out."""

    sequences: int = 192
    """Self-sampled sequences of 128 tokens."""


@dataclass(frozen=True)
class Budget:
    """Number and places of compensators."""

    full_rank: int = 8
    """The budget is half the bytes of compensators of this rank on all modules."""

    cost_weight: float = 0.1
    """Weight of the time that a compensator adds to a decode step, against the damage."""

    tables: Path | None = None
    """Kernel latencies (twin.ec-tables/1) for that time; default: those of this project's kernels on a CPU."""

    def check(self) -> None:
        if not self.cost_weight >= 0:
            raise BadInput("expected a number of at least 0", field="--cost-weight", value=self.cost_weight)
