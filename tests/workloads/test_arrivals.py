from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammainc

from workloads.arrivals import Arrivals, ClosedLoop, Deterministic, Gamma, Poisson, Replay
from workloads.errors import BadInput

RATES = st.floats(1e-6, 1e6)
PROCESSES: st.SearchStrategy[Arrivals] = st.one_of(
    st.just(ClosedLoop()),
    st.builds(Poisson, RATES),
    st.builds(Gamma, RATES, st.floats(1e-3, 100)),
    st.builds(Deterministic, RATES),
    st.builds(Replay, st.lists(st.floats(0, 1e9), min_size=100, max_size=120).map(sorted)),
)


@pytest.mark.parametrize(
    ("process", "rate", "cv"),
    [
        (Poisson(4.0), 4.0, 1.0),
        (Poisson(0.01), 0.01, 1.0),
        (Gamma(4.0, 0.3), 4.0, 0.3),
        (Gamma(4.0, 1.0), 4.0, 1.0),
        (Gamma(250.0, 3.5), 250.0, 3.5),
    ],
    ids=repr,
)
def test_gaps_have_the_stated_rate_and_cv(process: Arrivals, rate: float, cv: float, assert_mean_and_cv) -> None:
    times = process.times(np.random.default_rng(1), 200_000)
    assert_mean_and_cv(np.diff(times, prepend=0.0), 1 / rate, cv)


@pytest.mark.parametrize("cv", [0.5, 2.0])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.99])
def test_gaps_are_gamma_from_the_shortest_to_the_longest(cv: float, share: float) -> None:
    """The share of gaps below a point, against the gamma distribution function there: nothing is clipped."""
    gaps = np.sort(np.diff(Gamma(10.0, cv).times(np.random.default_rng(2), 100_000), prepend=0.0))
    point = gaps[int(share * len(gaps))]
    below = gammainc(cv**-2, point * 10.0 / cv**2)
    assert abs(below - share) < 5 * math.sqrt(share * (1 - share) / len(gaps))


def test_the_first_gap_comes_before_the_first_request() -> None:
    first = [Poisson(2.0).times(np.random.default_rng(seed), 1)[0] for seed in range(4000)]
    assert abs(np.mean(first) - 0.5) < 5 * 0.5 / math.sqrt(4000)


@pytest.mark.parametrize(
    ("process", "times"), [(Deterministic(4.0), [0.25, 0.5, 0.75]), (ClosedLoop(), [0.0, 0.0, 0.0])], ids=repr
)
def test_times_without_chance(process: Arrivals, times: list[float]) -> None:
    assert process.times(np.random.default_rng(0), 3).tolist() == times


def test_a_replay_is_used_as_it_is() -> None:
    replay = Replay([3.0, 3.0, 7.5])
    rng = np.random.default_rng(0)
    assert replay.times(rng, 3).tolist() == [3.0, 3.0, 7.5]
    assert replay.times(rng, 2).tolist() == [3.0, 3.0]
    assert rng.bit_generator.state == np.random.default_rng(0).bit_generator.state


def test_a_replay_has_no_more_than_was_recorded() -> None:
    with pytest.raises(BadInput, match=r"^size: got 3, expected at most the 2 recorded arrivals"):
        Replay([1, 2]).times(np.random.default_rng(0), 3)


@given(process=PROCESSES, size=st.integers(0, 100), seed=st.integers(0, 2**32))
def test_times_never_go_backwards_and_seeds_repeat(process: Arrivals, size: int, seed: int) -> None:
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    times = process.times(rng, size)
    assert times.dtype == np.float64
    assert times.shape == (size,)
    assert np.isfinite(times).all()
    assert (np.diff(times, prepend=0.0) >= 0).all()
    assert times.tolist() == process.times(again, size).tolist()
    assert rng.bit_generator.state == again.bit_generator.state


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf, 1e-13, 1e13, None, "3", True])
@pytest.mark.parametrize("family", [Poisson, Deterministic, lambda rate: Gamma(rate, 1.0)])
def test_a_rate_is_positive_and_finite(family, rate: float) -> None:
    with pytest.raises(BadInput, match=r"^rate: .*expected a number from 1e-12 to 1e\+12"):
        family(rate)


@pytest.mark.parametrize("cv", [0, -1, math.nan, math.inf, 101, None, "1"])
def test_a_cv_is_positive_and_finite(cv: float) -> None:
    with pytest.raises(BadInput, match=r"^cv: .*expected a number from 0.001 to 100"):
        Gamma(1.0, cv)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([], "recorded: got"),
        ([-1.0], r"recorded\[0\]: got -1.0, expected a finite time"),
        ([0.0, math.nan], r"recorded\[1\]: got nan, expected a finite time"),
        ([0.0, math.inf], r"recorded\[1\]: got inf, expected a finite time"),
        ([0.0, 2.0, 1.0], r"recorded\[2\]: got 1.0, expected a time no earlier"),
        (["1"], "recorded: got"),
        ([[1.0]], "recorded: got"),
        ([[1.0], [2.0, 3.0]], "recorded: got"),
        ([None], "recorded: got"),
    ],
)
def test_recorded_times_are_checked(times: list[float], message: str) -> None:
    with pytest.raises(BadInput, match=f"^{message}"):
        Replay(times)


@given(process=PROCESSES, sizes=st.lists(st.integers(0, 40), max_size=5), seed=st.integers(0, 2**32))
def test_a_stream_gives_the_same_times_bit_by_bit(process: Arrivals, sizes: list[int], seed: int) -> None:
    sizes = sizes if sum(sizes) <= 100 else []
    stream = process.stream(np.random.default_rng(seed))
    bits = [time for size in sizes for time in stream(size).tolist()]
    assert bits == process.times(np.random.default_rng(seed), sum(sizes)).tolist()


def test_a_stream_of_recorded_times_ends_with_them() -> None:
    stream = Replay([1, 2, 3]).stream(np.random.default_rng(0))
    assert stream(2).tolist() == [1.0, 2.0]
    with pytest.raises(BadInput, match=r"^size: got 4, expected at most the 3 recorded arrivals"):
        stream(2)
