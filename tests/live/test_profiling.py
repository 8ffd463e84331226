"""Sizes of profiling rounds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from live.validation.profiling import sequences_left, stratified_sizes


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 2]), st.integers(0, 2**32))
def test_sizes_are_spread_over_the_whole_range(rounds: int, largest: int, power: int, seed: int) -> None:
    """One in each of as many equal parts of the roots' range: no seed leaves a part out."""
    sizes = stratified_sizes(np.random.default_rng(seed), rounds, largest, power)
    assert len(sizes) == rounds
    assert min(sizes) >= 1
    assert max(sizes) <= largest
    for i, each in enumerate(sorted(sizes)):
        assert largest * (i / rounds) ** power - 1 <= each <= largest * ((i + 1) / rounds) ** power + 1


def test_half_lie_below_a_quarter() -> None:
    sizes = stratified_sizes(np.random.default_rng(3), 400, 1000, power=2)
    assert np.mean(np.array(sizes) <= 250) == pytest.approx(0.5, abs=0.01)
    assert sizes != sorted(sizes)


@given(st.integers(1, 300), st.integers(2, 200))
def test_all_stay_for_half_a_round_and_leave_evenly_until_one_is_left(num_seqs: int, steps: int) -> None:
    left = [sequences_left(num_seqs, i, steps) for i in range(steps + 1)]
    assert left[: steps // 2 + 1] == [num_seqs] * (steps // 2 + 1)
    assert left[-1] == 1
    falls = [before - after for before, after in itertools.pairwise(left)]
    assert min(falls) >= 0
    assert max(falls) <= math.ceil(2 * num_seqs / steps) + 1
