"""The law of an instance's token load, against exact convolution and against draws."""

from __future__ import annotations

import numpy as np
import pytest

from twin.theory.cycle import constant_load, instance_load, load_phases, load_quantile
from workloads.lengths import Fixed, Geometric, LogNormal, Uniform
from workloads.pairs import Independent, JointEmpirical


@pytest.mark.parametrize("slots", [1, 2, 7, 64])
def test_sum_of_slots_matches_exact_convolution(slots: int) -> None:
    rng = np.random.default_rng(slots)
    slot = rng.random(60)
    slot /= slot.sum()
    exact = np.array([1.0])
    for _ in range(slots):
        exact = np.convolve(exact, slot)
    law = instance_load(slot, slots)
    cdf = np.cumsum(exact) - exact / 2
    levels = np.array([0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
    spread = np.sqrt(exact @ np.arange(len(exact)) ** 2 - (exact @ np.arange(len(exact))) ** 2)
    # A sum of few slots is a staircase: both read it between the stairs, so a token either way is the same answer.
    expected = np.interp(levels, cdf, np.arange(len(exact)))
    np.testing.assert_allclose(law.quantile(levels), expected, atol=max(0.01 * spread, 1.0))
    assert law.mean == pytest.approx(float(exact @ np.arange(len(exact))), rel=1e-12)


def test_mean_of_the_quantile_function_is_the_mean() -> None:
    law = instance_load(Independent(LogNormal(400, 1.5), Geometric(200)).slot_load_pmf(), 128)
    levels = (np.arange(200_000) + 0.5) / 200_000
    assert law.quantile(levels).mean() == pytest.approx(law.mean, rel=1e-4)


def test_largest_of_many_matches_draws() -> None:
    lengths = Independent(Geometric(100), Geometric(500))
    law = instance_load(lengths.slot_load_pmf(), 64)
    rng = np.random.default_rng(0)
    # A slot at a random step holds a prompt and an age, geometric from 0 on by its lack of memory.
    loads = rng.geometric(1 / 100, (20_000, 64)).sum(axis=1) + (rng.geometric(1 / 500, (20_000, 64)) - 1).sum(axis=1)
    largest = loads.reshape(-1, 8).max(axis=1)
    levels = (np.arange(4000) + 0.5) / 4000
    expected = law.largest_of(8, levels).mean()
    assert abs(largest.mean() - expected) < 5 * largest.std() / np.sqrt(len(largest))
    assert expected > law.mean + 1.2 * loads.std()


def test_constant_lengths_take_turns_in_step() -> None:
    laws = load_phases(Independent(Fixed(10), Fixed(4)), 3, in_step=True)
    assert [law.mean for law in laws] == [30, 33, 36, 39]
    assert all(float(law.quantile(np.array([0.3]))[0]) == law.mean for law in laws)


def test_many_phases_are_thinned_without_losing_the_mean() -> None:
    laws = load_phases(Independent(Uniform(1, 9), Fixed(500)), 8, in_step=True)
    assert len(laws) == 64
    assert np.mean([law.mean for law in laws]) == pytest.approx(8 * (5 + 249.5))


def test_constant_lengths_that_start_apart_mix() -> None:
    (law,) = load_phases(Independent(Fixed(10), Fixed(5)), 3, in_step=False)
    assert law.mean == pytest.approx(3 * 12)
    assert law.quantile(np.array([0.99]))[0] > law.quantile(np.array([0.01]))[0]


def test_joint_lengths_carry_their_correlation() -> None:
    together = JointEmpirical([10, 1000], [10, 1000])
    apart = together.independent()
    assert together.renewal_load() > 1.3 * apart.renewal_load()
    assert instance_load(together.slot_load_pmf(), 4).mean == pytest.approx(4 * together.renewal_load())


def test_a_load_that_never_varies() -> None:
    law = constant_load(7.0)
    assert law.quantile(np.array([0.0, 0.4, 1.0])).tolist() == [7.0, 7.0, 7.0]
    assert instance_load(np.array([0.0, 0.0, 1.0]), 5).mean == 10


def test_load_quantile_matches_draws() -> None:
    lengths = Independent(Geometric(100), Geometric(500))
    rng = np.random.default_rng(0)
    loads = rng.geometric(1 / 100, (20_000, 64)).sum(axis=1) + (rng.geometric(1 / 500, (20_000, 64)) - 1).sum(axis=1)
    for level in (0.5, 0.99):
        share = float((loads <= load_quantile(lengths, 64, level, in_step=False)).mean())
        assert abs(share - level) < 5 * np.sqrt(level * (1 - level) / len(loads))


def test_load_quantile_of_slots_in_step_is_that_of_their_last_step() -> None:
    lengths = Independent(Fixed(100), Fixed(20))
    assert load_quantile(lengths, 8, 0.999, in_step=True) == 8 * (100 + 19)
    # Out of step, ages are spread over 0 to 19: the sum stays below that.
    assert 8 * (100 + 9.5) < load_quantile(lengths, 8, 0.999, in_step=False) < 8 * (100 + 19)
