"""Percentiles of latencies, also of values with weights and of values in parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.metrics import exact_sum, quantiles, spread, weighted_spread, weighted_spread_of_parts

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


@given(st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 5)), min_size=1, max_size=40))
def test_weights_are_repetitions(pairs: list[tuple[float, int]]) -> None:
    values, weights = np.array([v for v, _ in pairs]), np.array([w for _, w in pairs])
    plain = spread(np.repeat(values, weights))
    result = weighted_spread(values, weights)
    assert (plain is None) == (result is None)
    if plain is not None:
        assert result == pytest.approx(plain)


@given(
    st.lists(
        st.tuples(st.one_of(st.floats(0, 1e3), st.sampled_from([0.0, 0.25, 1e-300])), st.integers(0, 5)), max_size=40
    ),
    st.integers(0, 40),
)
def test_values_in_parts_have_exactly_the_percentiles_of_the_whole(pairs: list[tuple[float, int]], split: int) -> None:
    values, weights = np.array([v for v, _ in pairs]), np.array([w for _, w in pairs], dtype=np.int64)
    total = weighted_spread(values, weights)
    result = weighted_spread_of_parts(lambda: [(values[:split], weights[:split]), (values[split:], weights[split:])])
    assert (total is None) == (result is None)
    if total is not None and result is not None:
        assert result.pop("mean") == pytest.approx(total.pop("mean"))
        assert result == total
