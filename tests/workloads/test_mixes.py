"""Mixes of models and of tasks: exact probabilities, and that they are what is drawn."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import BadInput
from workloads.lengths import Fixed, Geometric, LogNormal, Uniform
from workloads.mixes import ModelMix, TaskMix, TaskShare
from workloads.pairs import Independent, JointEmpirical

AGENTS = ["math", "code", "tools", "chat"]
CHATS = Independent(Geometric(200), Geometric(100))
WEIGHTS = st.lists(st.floats(0, 1e308, allow_nan=False), min_size=1, max_size=12).filter(any)


def names(count: int) -> list[str]:
    return [f"model-{rank}" for rank in range(1, count + 1)]


@pytest.mark.parametrize("skew", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 8, 40])
def test_zipf_is_the_inverse_power_of_the_rank(skew: int, count: int) -> None:
    """SUN appendix A.2, in exact fractions."""
    parts = [Fraction(1, rank**skew) for rank in range(1, count + 1)]
    exact = [float(part / sum(parts)) for part in parts]
    assert ModelMix.zipf(names(count), skew).probabilities.tolist() == pytest.approx(exact, rel=1e-14)


@given(weights=WEIGHTS)
def test_probabilities_are_shares_of_the_sum(weights: list[float]) -> None:
    parts = [Fraction(weight) for weight in weights]
    probabilities = ModelMix(names(len(weights)), weights).probabilities
    assert probabilities.tolist() == pytest.approx([float(part / sum(parts)) for part in parts], rel=1e-12)
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-14)
    with pytest.raises(ValueError, match="read-only"):
        probabilities[0] = 1.0


@pytest.mark.parametrize(
    ("mix", "another"),
    [
        (ModelMix.zipf(AGENTS), ModelMix.zipf(AGENTS, 0.05)),
        (ModelMix.zipf(AGENTS, 0.9), ModelMix.zipf(AGENTS, 0.85)),
        (ModelMix.zipf(names(50), 1.5), ModelMix.zipf(names(50), 1.45)),
        (ModelMix(AGENTS, [5, 0, 1, 2]), ModelMix(AGENTS, [5.2, 0.0, 1, 2])),
    ],
    ids=["uniform", "zipf", "many", "explicit"],
)
def test_models_are_drawn_as_often_as_they_should_be(mix: ModelMix, another: ModelMix, p_value) -> None:
    """And a slightly different mix is told apart, so the test could fail."""
    sample = mix.sample(np.random.default_rng(12), 200_000)
    assert sample.dtype == np.int64
    assert p_value(sample, mix.probabilities) > 1e-3
    assert p_value(another.sample(np.random.default_rng(12), 200_000), mix.probabilities) < 1e-6


@given(weights=WEIGHTS, seed=st.integers(0, 2**32))
def test_what_has_no_weight_is_never_drawn(weights: list[float], seed: int) -> None:
    mix = ModelMix(names(len(weights)), weights)
    assert all(weights[index] > 0 for index in mix.sample(np.random.default_rng(seed), 200))


@pytest.mark.parametrize(
    ("number", "weights", "index"), [(1 - 2**-53, [0.1] * 7 + [0.0], 6), (0.0, [0.0, 0.0, 3.0], 2)]
)
def test_not_even_by_the_first_and_the_last_number_of_a_generator(
    number: float, weights: list[float], index: int
) -> None:
    class Edge:
        def random(self, size: int) -> np.ndarray:
            return np.full(size, number)

    mix = ModelMix(names(len(weights)), weights)
    assert mix.sample(Edge(), 3).tolist() == [index] * 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("models", "weights", "message"),
    [
        ([], [], "^models: got .*one or more names"),
        ("chat", [1], "^models: got 'chat', expected a list"),
        (["a", ""], [1, 1], "^models: got .*one or more names"),
        (["a", 3], [1, 1], "^models: got .*one or more names"),
        (["a", "b", "a"], [1, 1, 1], "^models: got 'a', expected each model once"),
        (["a", "b"], [1], r"^len\(weights\): got 1, expected as many as models \(2\)"),
        (["a", "b"], [1, -1], r"^weights\[1\]: got -1.0, expected a finite number, 0 or more"),
        (["a", "b"], [math.nan, 1], r"^weights\[0\]: got nan"),
        (["a", "b"], [1, math.inf], r"^weights\[1\]: got inf"),
        (["a", "b"], [0, 0], r"^weights: got \[0, 0\], expected at least one above 0"),
        (["a"], ["1"], "^weights: got"),
        (["a"], [True], "^weights: got"),
        (["a"], None, "^weights: "),
    ],
)
def test_a_bad_model_mix_is_refused(models: list[str], weights: list[float], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ModelMix(models, weights)


@pytest.mark.parametrize("skew", [-0.1, math.nan, math.inf, "1", None, True])
def test_a_skew_is_a_number_from_0_up(skew: float) -> None:
    with pytest.raises(BadInput, match=r"^skew: .*expected a number from 0"):
        ModelMix.zipf(AGENTS, skew)


TASKS_OF_A_DAY = TaskMix(
    [
        TaskShare("generate", 2, JointEmpirical([10, 20], [3, 4])),
        TaskShare("classify", 1, Uniform(100, 199), priority=-5),
        TaskShare("embed", 0, Fixed(7)),
        TaskShare("generate", 0.5, Independent(Fixed(1000), Fixed(1))),
        TaskShare("rerank", 0.5, LogNormal(700, 0.5)),
    ]
)


def test_tasks_are_drawn_as_often_as_they_should_be(p_value) -> None:
    assert TASKS_OF_A_DAY.probabilities.tolist() == [0.5, 0.25, 0.0, 0.125, 0.125]
    sample = TASKS_OF_A_DAY.sample(np.random.default_rng(21), 100_000)
    assert p_value(sample, TASKS_OF_A_DAY.probabilities) > 1e-3
    assert p_value(sample, np.array([0.49, 0.26, 0.0, 0.125, 0.125])) < 1e-6


def test_each_task_has_lengths_of_its_own() -> None:
    sample, prompts, answers = TASKS_OF_A_DAY.stream(np.random.default_rng(3))(20_000)
    of = [(prompts[sample == share], answers[sample == share]) for share in range(5)]
    assert set(zip(of[0][0].tolist(), of[0][1].tolist(), strict=True)) == {(10, 3), (20, 4)}
    assert (of[1][0].min(), of[1][0].max(), of[1][1].max()) == (100, 199, 0)
    assert len(of[2][0]) == 0
    assert Counter(of[3][0].tolist()).keys() == {1000}
    assert Counter(of[3][1].tolist()).keys() == {1}
    assert abs(of[4][0].mean() - 700) < 5 * of[4][0].std() / math.sqrt(len(of[4][0]))
    assert not of[4][1].any()


def test_a_task_keeps_its_lengths_when_another_changes() -> None:
    def second(first: TaskShare) -> list[int]:
        mix = TaskMix([first, TaskShare("score", 1, Uniform(1, 10_000))])
        sample, prompts, _ = mix.stream(np.random.default_rng(9))(100)
        return prompts[sample == 1].tolist()

    assert second(TaskShare("embed", 1, Fixed(5))) == second(TaskShare("generate", 1, CHATS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chat", 1, CHATS), "^task: got 'chat', expected one of generate, classify"),
        (("generate", -1, CHATS), "^weight: got -1, expected a number from 0"),
        (("generate", math.inf, CHATS), "^weight: got inf"),
        (("generate", 1, Fixed(3)), r"^lengths: got Fixed\(value=3\), expected LengthPairs, .* task generate"),
        (("embed", 1, CHATS), "^lengths: got .*expected Lengths, of the prompts alone, for the task embed"),
        (("embed", 1, 12), "^lengths: got 12, expected Lengths"),
        (("embed", 1, Fixed(3), 0.5), "^priority: got 0.5, expected a whole number"),
    ],
)
def test_a_bad_share_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TaskShare(*arguments)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([], "^shares: got .*expected one or more TaskShare"),
        (["generate"], "^shares: got .*expected one or more TaskShare"),
        ([TaskShare("embed", 0, Fixed(3))], "^weights: got .*expected at least one above 0"),
    ],
)
def test_a_mix_without_any_requests_is_refused(shares: list[TaskShare], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TaskMix(shares)


def test_one_share_of_one_length_is_constant_and_a_share_of_no_weight_changes_nothing() -> None:
    single, absent = TaskShare("embed", 1, Fixed(9)), TaskShare("classify", 0, Uniform(1, 9))
    assert TaskMix([single]).is_constant
    assert TaskMix([absent, single]).is_constant
    assert not TaskMix([TaskShare("classify", 1, Uniform(1, 9))]).is_constant
    assert not TaskMix([single, TaskShare("score", 1, Fixed(9))]).is_constant
