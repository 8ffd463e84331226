"""Operations by hand, and the split of prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from live.adaptation.tasks import HELD_OUT, OPERATIONS, VOCABULARY, draw, is_held_out, operation_token
from workloads.errors import BadInput

BY_HAND = {
    "copy": [3, 9, 0, 7],
    "reverse": [7, 0, 9, 3],
    "sort": [0, 3, 7, 9],
    "sort_down": [9, 7, 3, 0],
    "add_one": [4, 0, 1, 8],
    "add_three": [6, 2, 3, 0],
    "negate": [7, 1, 0, 3],
    "rotate": [9, 0, 7, 3],
    "reverse_add_one": [8, 1, 0, 4],
    "sort_add_three": [0, 2, 3, 6],
    "running_sum": [3, 2, 2, 9],
    "negate_rotate": [1, 0, 3, 7],
}


def test_every_operation_by_hand() -> None:
    assert {name: OPERATIONS[name](np.array([[3, 9, 0, 7]]))[0].tolist() for name in OPERATIONS} == BY_HAND


def test_a_prompt_is_the_operation_and_digits_and_its_answer_follows() -> None:
    prompts, answers = draw(["reverse", "negate"], 4, 50, seed=1, step=2)
    assert prompts.shape == (50, 5)
    names = set()
    for prompt, answer in zip(prompts.numpy(), answers.numpy(), strict=True):
        name = next(name for name in OPERATIONS if operation_token(name) == prompt[0])
        assert OPERATIONS[name](prompt[None, 1:])[0].tolist() == answer.tolist()
        names.add(name)
    assert names == {"reverse", "negate"}
    assert prompts.max() < VOCABULARY


def test_equal_arguments_draw_the_same_and_others_do_not() -> None:
    first, again = (draw(["copy"], 5, 8, 0, 3)[0] for _ in range(2))
    assert torch.equal(first, again)
    for batch in (draw(["copy"], 5, 8, 1, 3), draw(["copy"], 5, 8, 0, 4), draw(["copy"], 5, 8, 0, 3, "evaluation")):
        assert not torch.equal(first, batch[0])


def test_no_training_draws_a_prompt_of_the_evaluation() -> None:
    trained, evaluated = (draw(["copy"], 4, 3000, 0, 0, part)[1].numpy() for part in ("training", "evaluation"))
    assert not is_held_out(trained).any()
    assert is_held_out(evaluated).all()
    every = np.array([[number // 10**place % 10 for place in range(4)] for number in range(10_000)])
    assert is_held_out(every).mean() == pytest.approx(HELD_OUT, abs=0.01)


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(BadInput, match=r"task: got 'dance', expected one of copy, reverse"):
        draw(["dance"], 4, 1, 0, 0)
