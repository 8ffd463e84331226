"""Sequence operations: a prompt is an operation's token and some digits, its answer as many digits; sizes of models.

Token ids: 0 to 9 are the digits, then come the operations in the order of `OPERATIONS`. Answers are as long as the
digits, so that no end token is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from live.adaptation.forward import Modules
from live.adaptation.training import TrainingSettings, read_sizes
from live.adaptation.weights import small_config
from live.models.config import Family, ModelConfig
from workloads.errors import BadInput

Digits: TypeAlias = NDArray[np.int64]
"""(prompts, digits), each from 0 to 9."""

Part: TypeAlias = Literal["training", "evaluation"]

BASE_OPERATIONS: dict[str, Callable[[Digits], Digits]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[:, ::-1],
    "sort": lambda x: np.sort(x, axis=1),
    "sort_down": lambda x: np.sort(x, axis=1)[:, ::-1],
    "add_one": lambda x: (x + 1) % 10,
    "add_three": lambda x: (x + 3) % 10,
    "negate": lambda x: -x % 10,
    "rotate": lambda x: np.roll(x, -1, axis=1),
}
"""Operations that a base model is trained on."""

NEW_OPERATIONS: dict[str, Callable[[Digits], Digits]] = {
    "reverse_add_one": lambda x: (x[:, ::-1] + 1) % 10,
    "sort_add_three": lambda x: np.sort((x + 3) % 10, axis=1),
    "running_sum": lambda x: np.cumsum(x, axis=1) % 10,
    "negate_rotate": lambda x: -np.roll(x, -1, axis=1) % 10,
}
"""Operations that no base model has seen: the tasks of fine-tuning."""

HARD_OPERATIONS = ("running_sum",)
"""New operations that no base operation helps with: none adds two digits."""

OPERATIONS = BASE_OPERATIONS | NEW_OPERATIONS

VOCABULARY = 10 + len(OPERATIONS)

HELD_OUT = 1 / 8
"""Share of the prompts that no training draws."""

_STREAMS: dict[Part, int] = {"training": 0, "evaluation": 1}


def draw(
    operations: Sequence[str], digits: int, count: int, seed: int, step: int, part: Part = "training"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw prompts (count, 1 + digits) and answers (count, digits), int64; equal arguments draw the same.

    Training prompts and evaluation prompts (`part`) have no digits in common.
    """
    for name in operations:
        if name not in OPERATIONS:
            raise BadInput(f"expected one of {', '.join(OPERATIONS)}", field="task", value=name)
    generator = np.random.default_rng([seed, _STREAMS[part], step])
    values = _drawn(generator, digits, count, part)
    indices = generator.integers(len(operations), size=count)
    answers = np.empty_like(values)
    tokens = np.empty((count, 1), dtype=np.int64)
    for index, name in enumerate(operations):
        rows = indices == index
        answers[rows] = OPERATIONS[name](values[rows])
        tokens[rows] = operation_token(name)
    return torch.from_numpy(np.concatenate([tokens, values], axis=1)), torch.from_numpy(answers)


def operation_token(name: str) -> int:
    return 10 + list(OPERATIONS).index(name)


def is_held_out(values: Digits) -> NDArray[np.bool_]:
    """True for digits that are kept for evaluation: a multiplicative hash of their number is small (Knuth)."""
    numbers = (values.astype(np.uint64) * 10 ** np.arange(values.shape[1], dtype=np.uint64)).sum(axis=1)
    hashed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64
    small: NDArray[np.bool_] = hashed >> np.uint64(32) < np.uint64(HELD_OUT * 2**32)
    return small


def _drawn(generator: np.random.Generator, digits: int, count: int, part: Part) -> Digits:
    rows = np.empty((0, digits), dtype=np.int64)
    while len(rows) < count:
        values = generator.integers(10, size=(2 * count, digits))
        rows = np.concatenate([rows, values[is_held_out(values) == (part == "evaluation")]])
    return rows[:count]


@dataclass(frozen=True)
class Lesson:
    """Prompts of some digits with their answers, each by one of the operations, drawn from a seed."""

    operations: tuple[str, ...]
    digits: int
    seed: int

    def batch(self, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(self.operations, self.digits, size, self.seed, step)

    def loss(self, modules: Modules, size: int, step: int) -> torch.Tensor:
        return modules.loss(*self.batch(size, step))

    def exact_match(self, modules: Modules, prompts: int) -> float:
        """The share of right answers to prompts that no training draws."""
        return modules.exact_match(*draw(self.operations, self.digits, prompts, self.seed, 0, "evaluation"))

    def measure(self, modules: Modules, prompts: int) -> dict[str, float]:
        return {"exact_match": self.exact_match(modules, prompts)}

    def sequences(self, count: int) -> torch.Tensor:
        """Prompts with their answers from the training part, (count, n)."""
        return torch.cat(self.batch(count, 0), dim=1)


MAX_POSITIONS = 64


@dataclass(frozen=True)
class Size:
    """A base model with prompts of some digits, and its trainings; `hard`: for a task that no base operation helps
    with.

    `retuning`: of a tuned module, for a decode module in few bits. `prompts`: of an evaluation.
    """

    layers: int
    hidden: int
    digits: int
    base: TrainingSettings
    adaptation: TrainingSettings
    hard: TrainingSettings
    retuning: TrainingSettings
    hard_retuning: TrainingSettings
    prompts: int = 1024

    def config(self, family: Family = "llama") -> ModelConfig:
        return small_config(self.layers, self.hidden, VOCABULARY, MAX_POSITIONS, family)

    def fine_tuning(self, task: str) -> TrainingSettings:
        return self.hard if task in HARD_OPERATIONS else self.adaptation

    def tuning_again(self, task: str) -> TrainingSettings:
        return self.hard_retuning if task in HARD_OPERATIONS else self.retuning


SIZES = read_sizes(Size, "operations")
