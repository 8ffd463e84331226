"""What probing sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from live.validation.probe import spread


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(0, 2**32))
def test_sizes_are_spread_over_the_whole_range(rounds: int, most: int, seed: int) -> None:
    """One in each of as many equal parts of the square roots' range: no seed leaves a part out."""
    found = spread(np.random.default_rng(seed), rounds, most)
    assert len(found) == rounds
    assert min(found) >= 1
    assert max(found) <= most
    for i, each in enumerate(sorted(found)):
        assert most * (i / rounds) ** 2 - 1 <= each <= most * ((i + 1) / rounds) ** 2 + 1


def test_half_lie_below_a_quarter() -> None:
    found = spread(np.random.default_rng(3), 400, 1000)
    assert np.mean(np.array(found) <= 250) == pytest.approx(0.5, abs=0.01)
    assert found != sorted(found)
