"""What probing sends."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from live.validation.probe import spread, staying


@given(st.integers(1, 300), st.integers(1, 5000), st.sampled_from([1, 2]), st.integers(0, 2**32))
def test_sizes_are_spread_over_the_whole_range(rounds: int, most: int, power: int, seed: int) -> None:
    """One in each of as many equal parts of the roots' range: no seed leaves a part out."""
    found = spread(np.random.default_rng(seed), rounds, most, power)
    assert len(found) == rounds
    assert min(found) >= 1
    assert max(found) <= most
    for i, each in enumerate(sorted(found)):
        assert most * (i / rounds) ** power - 1 <= each <= most * ((i + 1) / rounds) ** power + 1


def test_half_lie_below_a_quarter() -> None:
    found = spread(np.random.default_rng(3), 400, 1000, power=2)
    assert np.mean(np.array(found) <= 250) == pytest.approx(0.5, abs=0.01)
    assert found != sorted(found)


@given(st.integers(1, 300), st.integers(2, 200))
def test_all_stay_for_half_a_round_and_leave_evenly_until_one_is_left(together: int, steps: int) -> None:
    left = [staying(together, i, steps) for i in range(steps + 1)]
    assert left[: steps // 2 + 1] == [together] * (steps // 2 + 1)
    assert left[-1] == 1
    falls = [before - after for before, after in itertools.pairwise(left)]
    assert min(falls) >= 0
    assert max(falls) <= math.ceil(2 * together / steps) + 1
