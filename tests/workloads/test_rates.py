"""Arrivals whose rate changes over time, against the integral of the rate and the Poisson process that it defines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from workloads.arrivals import DAY_PIECES, Bursts, Deterministic, Gamma, Piece, Poisson, Profile, Varying, peak_of
from workloads.checks import FloatArray
from workloads.errors import BadInput

STEPS = Profile.of_points([(0, 1), (10, 4), (15, 0), (20, 1)], "steps")
RAMPS = Profile.of_points([(0, 0), (10, 3), (30, 1), (40, 0)], "ramps")


def expected(profile: Profile, rate: float, until: float, start: float = 0.0) -> float:
    """∫ rate·m dt from 0 to `until`, piece by piece."""
    total, time = 0.0, 0.0
    for length, begin, end in profile.repeated(start):
        part = min(length, until - time)
        total += part * (begin + (begin + (end - begin) * part / length)) / 2
        time += part
        if time >= until:
            return rate * total
    raise AssertionError


def test_the_mean_over_a_period_is_the_rate() -> None:
    for profile in (STEPS, RAMPS, Profile.of_day(0.7, 50400.0)):
        assert expected(profile, 3.0, profile.period) == pytest.approx(3.0 * profile.period)
    assert [begin for _, begin, _ in STEPS.pieces] == pytest.approx(
        [20 / 30, 80 / 30, 0]
    )  # (10·1 + 5·4 + 5·0)/20 = 1.5
    assert STEPS.peak == pytest.approx(80 / 30)


@pytest.mark.parametrize(
    "profile", [STEPS, RAMPS, Profile.of_day(1.0, 5.0, period=30.0)], ids=["steps", "ramps", "day"]
)
@pytest.mark.parametrize("start", [0.0, 12.5])
def test_equal_gaps_come_where_the_integral_of_the_rate_is_a_whole_number(profile: Profile, start: float) -> None:
    times = Varying(Deterministic(5.0), profile, start=start).times(np.random.default_rng(0), 500)
    assert [expected(profile, 5.0, time, start) for time in times[::17]] == pytest.approx(range(1, 501, 17), rel=1e-9)


@pytest.mark.parametrize("profile", [STEPS, RAMPS], ids=["steps", "ramps"])
def test_counts_are_poisson_with_the_integral_as_their_mean(profile: Profile) -> None:
    """Counts of parts of a period are independent Poisson numbers: their mean and variance are the integral."""
    rate, periods, edges = 4.0, 4000, np.array([0.0, 3.0, 8.0, 12.0, 17.0, 20.0]) * profile.period / 20
    count = int(rate * profile.period * periods * 1.05)
    times = Varying(Poisson(rate), profile).times(np.random.default_rng(3), count)
    assert times[-1] > periods * profile.period
    times = times[times < periods * profile.period]
    counts_by_period = np.array(
        [np.histogram(part, edges)[0] for part in _by_period(times, profile.period, periods)], dtype=float
    )
    for column, (low, high) in enumerate(itertools.pairwise(edges)):
        mean = expected(profile, rate, high) - (expected(profile, rate, low) if low else 0.0)
        counts = counts_by_period[:, column]
        assert abs(counts.mean() - mean) <= 4.5 * math.sqrt(mean / periods)
        assert abs(counts.var() - mean) <= 4.5 * math.sqrt((mean + 2 * mean**2) / periods)
    correlation = np.corrcoef(counts_by_period[:, 0], counts_by_period[:, 1])[0, 1]
    assert abs(correlation) < 4.5 / math.sqrt(periods)


def _by_period(times: FloatArray, period: float, periods: int) -> list[FloatArray]:
    cuts = np.searchsorted(times, np.arange(1, periods) * period)
    return [part - i * period for i, part in enumerate(np.split(times, cuts))]


def test_times_within_a_ramp_have_its_density() -> None:
    """From 0 to 1 the rate rises from 0: a time has the distribution function t², as thinning would give."""
    ramp = Profile.of_points([(0, 0), (1, 1), (1.01, 0)], "ramps")
    times = Varying(Poisson(2.0), ramp).times(np.random.default_rng(4), 20_000) % ramp.period
    inside = times[times < 1.0]
    assert stats.kstest(inside, lambda t: t**2).pvalue > 1e-3


def test_bursts_keep_the_mean_rate_and_make_counts_vary() -> None:
    """Index of dispersion of a two-state Markov-modulated Poisson process, in its limit of long windows."""
    bursts = Bursts(factor=8.0, seconds=2.0, every=10.0)
    quiet, loud = bursts.levels
    assert 0.8 * quiet + 0.2 * loud == pytest.approx(1.0)
    assert loud == pytest.approx(8 * quiet)
    rate, window = 5.0, 400.0
    times = Varying(Poisson(rate), bursts=bursts).times(np.random.default_rng(5), 500_000)
    counts = np.bincount((times // window).astype(int))[:-1].astype(float)
    variance = rate**2 * (loud - quiet) ** 2 * 0.8 * 0.2  # variance of the rate
    memory = 1 / (1 / 8.0 + 1 / 2.0)  # time constant of its autocorrelation
    dispersion = 1 + 2 * variance * memory / rate * (1 - memory / window)
    windows = len(counts)
    assert counts.mean() / window == pytest.approx(rate, rel=4.5 * math.sqrt(dispersion / (rate * window * windows)))
    assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=5 * math.sqrt(2 / windows))


def test_a_burst_is_under_way_at_the_start_as_often_as_at_any_time() -> None:
    bursts = Bursts(8.0, 2.0, 10.0)
    loud = sum(next(bursts.pieces(np.random.default_rng(seed)))[1] > 1 for seed in range(3000))
    assert abs(loud / 3000 - 0.2) < 4.5 * math.sqrt(0.16 / 3000)


def test_profile_and_bursts_together_keep_the_mean_rate() -> None:
    process = Varying(Poisson(20.0), STEPS, Bursts(4.0, 1.0, 5.0))
    times = process.times(np.random.default_rng(6), 400_000)
    assert len(times) / times[-1] == pytest.approx(20.0, rel=0.02)
    assert not ((times % 20.0 > 15.0 + 1e-6) & (times % 20.0 < 20.0 - 1e-6)).any()  # the profile is silent there
    assert peak_of(process) == pytest.approx(80 / 30 * 4 / 1.6)


def test_a_random_start_is_uniform_over_the_period() -> None:
    process = Varying(Deterministic(1000.0), STEPS, start=None)
    first = [process.times(np.random.default_rng(seed), 20_000) for seed in range(60)]
    starts = {round(float(times[0]), 6) for times in first}
    assert len(starts) > 2  # some starts are in the silent part, and wait for its end
    assert process.is_random
    assert not Varying(Deterministic(1.0), STEPS).is_random


@settings(max_examples=settings().max_examples * 2 // 3)
@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=6),
    st.sampled_from([Poisson(2.0), Gamma(2.0, 3.0), Deterministic(2.0)]),
    st.sampled_from([None, Bursts(5.0, 1.0, 7.0)]),
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
)
def test_parts_of_a_stream_are_the_whole(
    pieces: list[Piece], base: Poisson, bursts: Bursts | None, sizes: list[int]
) -> None:
    if sum(length * (begin + end) for length, begin, end in pieces) < 1e-3:
        return
    process = Varying(base, Profile(tuple(pieces)), bursts)
    stream = process.stream(np.random.default_rng(1))
    parts = np.concatenate([stream(size) for size in sizes])
    at_once = process.times(np.random.default_rng(1), sum(sizes))
    assert parts.tolist() == at_once.tolist()
    assert (np.diff(at_once) >= 0).all()
    assert (at_once >= 0).all()


def test_a_day_has_its_peak_and_its_trough() -> None:
    day = Profile.of_day(0.6, 50400.0)
    rates = [begin for _, begin, _ in day.pieces]
    assert len(rates) == DAY_PIECES
    assert rates[56] == pytest.approx(1.6, rel=1e-3)  # 14:00
    assert min(rates) == pytest.approx(0.4, rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Profile.of_points([(0, 1)], "steps"),
        lambda: Profile.of_points([(1, 1), (2, 1)], "steps"),
        lambda: Profile.of_points([(0, 1), (0, 2)], "ramps"),
        lambda: Profile.of_points([(0, 0), (5, 0)], "ramps"),
        lambda: Profile.of_points([(0, -1), (5, 2)], "ramps"),
        lambda: Profile.of_day(1.5, 0.0),
        lambda: Bursts(0.5, 1.0, 2.0),
        lambda: Bursts(2.0, 3.0, 2.0),
    ],
)
def test_what_cannot_be_is_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(BadInput):
        wrong()
