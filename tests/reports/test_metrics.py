"""Quantiles of latencies."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reports.metrics import exact_sum, quantiles, spread

FINITE = st.floats(-1e9, 1e9, allow_subnormal=False)


@given(st.lists(FINITE, min_size=1, max_size=30), st.lists(st.floats(0, 1), max_size=5))
def test_quantiles_are_numpys_bit_for_bit(values: list[float], shares: list[float]) -> None:
    result = quantiles(np.array(values), np.array(shares, dtype=np.float64))
    assert result.tolist() == np.quantile(values, np.array(shares, dtype=np.float64)).tolist()


@given(st.lists(FINITE, min_size=1, max_size=30))
def test_a_spread_has_numpys_mean_and_percentiles(values: list[float]) -> None:
    expected = [np.mean(values), *np.percentile(values, (50, 90, 95, 99))]
    assert list((spread(np.array(values)) or {}).values()) == expected


@given(st.lists(st.lists(st.one_of(FINITE, st.floats(-1e300, 1e300)), max_size=30), max_size=4))
def test_a_sum_in_parts_is_rounded_once(parts: list[list[float]]) -> None:
    assert exact_sum(np.array(part) for part in parts) == math.fsum(value for part in parts for value in part)
