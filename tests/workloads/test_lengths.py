from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import ndtr

from workloads.errors import BadInput
from workloads.lengths import PMF_ENTRIES, REACH, Empirical, Fixed, Geometric, Lengths, LogNormal, Uniform, upper_tail

DRAWS = 200_000
VARYING: list[Lengths] = [
    Geometric(1.25),
    Geometric(350.5),
    LogNormal(300, 0.8),
    LogNormal(12, 0.4),
    LogNormal(10, 1.0),
    LogNormal(4000, 2.0),
    Uniform(0, 9),
    Uniform(100, 2000),
    Empirical([0, 1, 1, 5, 900]),
]
CONSTANT: list[Lengths] = [Fixed(0), Fixed(17), Geometric(1), Uniform(3, 3), Empirical([4, 4])]
EVERY = VARYING + CONSTANT

FAMILIES: st.SearchStrategy[Lengths] = st.one_of(
    st.builds(Fixed, st.integers(0, 5000)),
    st.builds(Geometric, st.floats(1, 3000)),
    st.builds(LogNormal, st.floats(30, 3000), st.floats(0.01, 1)),
    st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(lambda ends: Uniform(min(ends), max(ends))),
    st.builds(Empirical, st.lists(st.integers(0, 5000), min_size=1, max_size=20)),
)


@pytest.mark.parametrize(
    ("lengths", "mean", "cv"),
    [
        (Geometric(40), 40, math.sqrt(1 - 1 / 40)),
        (LogNormal(500, 0.6), 500, 0.6),
        (LogNormal(2000, 1.5), 2000, 1.5),
        (Uniform(1, 6), 3.5, math.sqrt(35 / 12) / 3.5),
        (Empirical([1, 3]), 2, 0.5),
    ],
    ids=repr,
)
def test_draws_are_what_the_label_says(lengths: Lengths, mean: float, cv: float, assert_mean_and_cv) -> None:
    assert_mean_and_cv(lengths.sample(np.random.default_rng(2), DRAWS), mean, cv)
    assert lengths.mean == pytest.approx(mean, rel=1e-4)
    assert lengths.cv == pytest.approx(cv, rel=1e-4)


@pytest.mark.parametrize("lengths", VARYING, ids=repr)
def test_draws_fall_as_the_pmf_says(lengths: Lengths) -> None:
    """Pearson's chi-square over cells that expect some 20 draws, within five of its standard deviations."""
    expected = lengths.pmf() * DRAWS
    sample = np.minimum(lengths.sample(np.random.default_rng(3), DRAWS), len(expected) - 1)
    observed = np.bincount(sample, minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    cell = np.minimum(np.cumsum(expected) // 20, DRAWS // 20 - 1).astype(int)
    expected_cells, observed_cells = np.bincount(cell, expected), np.bincount(cell, observed)
    expected_cells, observed_cells = expected_cells[expected_cells > 0], observed_cells[expected_cells > 0]
    freedom = len(expected_cells) - 1
    assert freedom >= 3
    assert ((observed_cells - expected_cells) ** 2 / expected_cells).sum() < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("lengths", CONSTANT, ids=repr)
def test_a_constant_is_always_drawn(lengths: Lengths) -> None:
    assert lengths.is_constant
    assert lengths.variance == lengths.cv == 0
    assert set(lengths.sample(np.random.default_rng(4), 100).tolist()) == {int(lengths.mean)}
    assert lengths.pmf().tolist() == [0.0] * int(lengths.mean) + [1.0]


@pytest.mark.parametrize("lengths", [family for family in EVERY if family != LogNormal(4000, 2.0)], ids=repr)
def test_moments_are_those_of_the_pmf(lengths: Lengths) -> None:
    mass = lengths.pmf()
    values = np.arange(len(mass))
    assert mass @ values == pytest.approx(lengths.mean, rel=1e-8)
    assert mass @ (values - lengths.mean) ** 2 == pytest.approx(lengths.variance, rel=1e-7)


@pytest.mark.parametrize(("mean", "cv"), [(5, 1.0), (20, 1.0), (2000, 1.0), (50_000, 0.3), (1e6, 1e-6)])
def test_lognormal_moments_equal_the_sum_over_every_length(mean: float, cv: float) -> None:
    """The last three reach past the lengths that are summed one by one, or hold hardly any of them."""
    sigma = math.sqrt(math.log1p(cv**2))
    mu = math.log(mean) - sigma**2 / 2
    values = np.arange(1, math.ceil(math.exp(mu + 9 * sigma)) + 2)
    below = ndtr((np.log(values + 0.5) - mu) / sigma)
    mass = np.diff(below, prepend=0.0)
    exact = mass @ (values - mean) + mean
    lengths = LogNormal(mean, cv)
    assert lengths.mean == pytest.approx(exact, rel=1e-10)
    assert lengths.variance == pytest.approx(mass @ (values - exact) ** 2, rel=1e-8, abs=1e-9)


def test_lognormal_beyond_any_table_still_has_its_moments() -> None:
    """Nearly all of the variance sits beyond the terms that are summed one by one."""
    lengths = LogNormal(1e6, 2.0)
    assert lengths.mean == pytest.approx(1e6, rel=1e-9)
    assert lengths.variance == pytest.approx(4e12, rel=1e-9)


@given(mean=st.floats(1, 40), cv=st.floats(0.05, 3))
def test_a_lognormal_is_refused_or_keeps_its_mean_within_a_hundredth(mean: float, cv: float) -> None:
    sigma = math.sqrt(math.log1p(cv**2))
    edges = np.log(np.arange(1, 200_000) + 0.5) - math.log(mean) + sigma**2 / 2
    mean_drawn = 1 + ndtr(-edges / sigma).sum()
    assume(abs(abs(mean_drawn / mean - 1) - 0.01) > 1e-4)
    if abs(mean_drawn / mean - 1) > 0.01:
        with pytest.raises(BadInput, match=r"^mean: got .*rounding keeps within 1 %"):
            LogNormal(mean, cv)
    else:
        assert LogNormal(mean, cv).mean == pytest.approx(mean_drawn, rel=1e-4)


def test_both_sides_of_that_refusal_are_met() -> None:
    assert LogNormal(10, 1.0).mean == pytest.approx(10, rel=0.01)
    with pytest.raises(BadInput, match=r"mean: got 2, expected a mean that rounding keeps within 1 %"):
        LogNormal(2, 1.0)
    with pytest.raises(BadInput, match=r"it would become 1"):
        LogNormal(1.4, 0.01)


@pytest.mark.parametrize(
    ("lengths", "beyond"),
    [
        (Fixed(10**8), 1.0),
        (Geometric(1e7), (1 - 1e-7) ** (PMF_ENTRIES - 2)),
        (Uniform(0, 10**8 - 1), 1 - (PMF_ENTRIES - 1) / 10**8),
        (Uniform(10**7, 10**8), 1.0),
        (LogNormal(1e7, 1.0), 1 - ndtr((math.log((PMF_ENTRIES - 1.5) / 1e7) + math.log(2) / 2) / math.log(2) ** 0.5)),
        (Empirical([1, 1, 10**8]), 1 / 3),
    ],
    ids=repr,
)
def test_what_no_table_holds_is_folded_into_the_last_entry(lengths: Lengths, beyond: float) -> None:
    mass = lengths.pmf()
    assert len(mass) == PMF_ENTRIES
    assert mass[-1] == pytest.approx(beyond, rel=1e-9)
    assert mass.sum() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("lengths", [Geometric(350.5), LogNormal(300, 0.8)], ids=repr)
def test_the_far_tail_is_cut_where_less_than_1e_12_remains(lengths: Lengths) -> None:
    mass = lengths.pmf()
    assert 0 < mass[-1] < 1e-12
    assert mass[-100:].sum() > 1e-12, "it could have been cut much earlier"


@given(lengths=FAMILIES, seed=st.integers(0, 2**32))
def test_every_draw_is_in_the_support_and_seeds_repeat(lengths: Lengths, seed: int) -> None:
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    sample = lengths.sample(rng, 200)
    assert sample.dtype == np.int64
    assert sample.shape == (200,)
    assert sample.min() >= lengths.minimum
    mass = lengths.pmf()
    assert (mass[sample[sample < len(mass)]] > 0).all()
    assert (sample == lengths.sample(again, 200)).all()
    assert rng.bit_generator.state == again.bit_generator.state


@given(lengths=FAMILIES)
def test_a_pmf_is_a_pmf_from_the_minimum_on(lengths: Lengths) -> None:
    mass = lengths.pmf()
    assert mass.dtype == np.float64
    assert mass.min() >= 0
    assert mass.sum() == pytest.approx(1.0, abs=1e-12)
    assert not mass[: lengths.minimum].any()


NO_NUMBERS = [math.nan, math.inf, True, None, "7"]


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (Fixed, [-1, 1.0, 1.5, 10**9 + 1, *NO_NUMBERS], r"value: .*expected a whole number from 0 to 1000000000"),
        (Geometric, [0.999, 0, -5, 1.1e9, *NO_NUMBERS], r"mean: .*expected a number from 1 to 1e\+09"),
        (lambda mean: LogNormal(mean, 1), [0, -3, *NO_NUMBERS], r"^mean: (got )?.*expected a number from"),
        (lambda cv: LogNormal(9, cv), [0, -1, *NO_NUMBERS], r"^cv: (got )?.*expected a number from"),
        (lambda low: Uniform(low, 3), [-1, 0.5], "^low: got .*expected a whole number from"),
        (lambda high: Uniform(5, high), [4, math.inf], "^high: got .*expected a whole number from"),
    ],
    ids=["fixed", "geometric", "log-normal mean", "log-normal cv", "low", "high"],
)
def test_parameters_that_make_no_distribution_are_refused(make, values: list[float], message: str) -> None:
    for value in values:
        with pytest.raises(BadInput, match=message):
            make(value)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([], "values"),
        ([1, -2], r"values\[1\]: got -2"),
        ([1, 2, 10**9 + 1], r"values\[2\]: got 1000000001"),
        ([2**63], r"values\[0\]: got 9223372036854775808"),
        ([10**30], "values"),
        ([1.5], "values"),
        ([math.nan], "values"),
        (["1"], "values"),
        ([True], "values"),
        ([[1], [2]], "values"),
        ([[1], [2, 3]], "values"),
        (7, "values"),
        (None, "values"),
    ],
)
def test_empirical_wants_a_flat_list_of_lengths(values: list[int], place: str) -> None:
    with pytest.raises(BadInput, match=f"^{place}.*expected a"):
        Empirical(values)


def test_the_normal_tail_agrees_with_scipy_over_the_whole_reach() -> None:
    z = np.linspace(-REACH, REACH, 1_000_003)
    exact = ndtr(-z)
    assert np.abs(upper_tail(z) - exact).max() < 1e-15
    assert (np.abs(upper_tail(z) - exact) / exact).max() < 1e-12


def test_points_beyond_reach_are_taken_at_reach() -> None:
    tail = upper_tail(np.array([-np.inf, -40.0, 40.0, np.inf]))
    assert tail.tolist() == upper_tail(np.array([-REACH, -REACH, REACH, REACH])).tolist()
    assert 0 < tail[-1] < 2e-19
