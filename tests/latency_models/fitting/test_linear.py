"""Lines: known coefficients, honest intervals, R², the held-out error, knees, and variation between groups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from latency_models.fitting.estimator import CannotFit, Floats, NotFitted, deviation_between
from latency_models.fitting.linear import LinearLatency, fit_piecewise
from reports.metrics import student_quantile
from workloads.errors import BadInput, TwinError

GRID = np.geomspace(16, 4096, 12)


def test_against_the_textbook_formulas() -> None:
    """x = 0, 1, 2, 3 and t = 10, 13, 13, 16: α = 1.8, β = 10.3, s² = 0.9, Var α = s²/5, Var β = s²·(1/4 + 2.25/5)."""
    line = LinearLatency().fit([0, 1, 2, 3], [10, 13, 13, 16])
    assert line.alpha_ == pytest.approx(1.8)
    assert line.beta_ == pytest.approx(10.3)
    assert line.noise_variance_ == pytest.approx(0.9)
    assert line.degrees_ == 2
    np.testing.assert_allclose(line.covariance_, [[0.18, -0.27], [-0.27, 0.63]])
    assert line.r_squared_ == pytest.approx(0.9)
    quantile = 4.302652729911275  # Student's t, 2 degrees, 97.5 %
    assert line.alpha_interval_ == pytest.approx((1.8 - quantile * math.sqrt(0.18), 1.8 + quantile * math.sqrt(0.18)))
    assert line.beta_interval_ == pytest.approx((10.3 - quantile * math.sqrt(0.63), 10.3 + quantile * math.sqrt(0.63)))


def test_relative_is_least_squares_with_the_lines_own_weights() -> None:
    """At the solution the score Σ (t − t̂)/t̂² · (x, 1) vanishes."""
    times = (0.01 * GRID + 2.0) * np.exp(np.random.default_rng(1).normal(0, 0.1, len(GRID)))
    line = LinearLatency(relative=True).fit(GRID, times)
    fitted = line.predict(GRID)
    score = (times - fitted) / fitted**2
    assert abs(score.sum()) < 1e-6 * np.abs(score).sum()
    assert abs((score * GRID).sum()) < 1e-6 * np.abs(score * GRID).sum()


@given(
    alpha=st.floats(1e-9, 1e3),
    beta=st.just(0.0) | st.floats(1e-6, 1e4),
    first=st.just(0.0) | st.floats(1e-3, 1e5),
    steps=st.lists(st.floats(0.5, 1e4), min_size=2, max_size=20),
    relative=st.booleans(),
)
def test_points_on_a_line_give_the_line_back(
    alpha: float, beta: float, first: float, steps: list[float], relative: bool
) -> None:
    sizes = first + np.concatenate(([0.0], np.cumsum(steps)))
    times = alpha * sizes + beta
    assume(times.min() > 0)
    assume(np.ptp(times) > 1e-9 * times.max())  # else flat to the last digits, with nothing to recover α from
    line = LinearLatency(relative=relative).fit(sizes, times)
    np.testing.assert_allclose(line.predict(sizes), times, rtol=1e-9, atol=1e-9 * times.max())
    assert line.alpha_ == pytest.approx(alpha, rel=1e-4)
    assert line.r_squared_ == pytest.approx(1.0, abs=1e-6)
    assert line.range_ == (sizes[0], sizes[-1])


@given(scale=st.floats(1e-9, 1e9), stretch=st.floats(1e-3, 1e6))
def test_units_change_the_coefficients_and_nothing_else(scale: float, stretch: float) -> None:
    noisy = (3.0 * GRID + 100.0) * (1 + 0.02 * np.cos(GRID))
    line, second = LinearLatency().fit(GRID, noisy), LinearLatency().fit(GRID * stretch, noisy * scale)
    assert second.alpha_ == pytest.approx(line.alpha_ * scale / stretch, rel=1e-9)
    assert second.beta_ == pytest.approx(line.beta_ * scale, rel=1e-9)
    assert second.r_squared_ == pytest.approx(line.r_squared_, rel=1e-9)
    assert second.heldout_median_error_ == pytest.approx(line.heldout_median_error_, rel=1e-6)


def simulated(rng: np.random.Generator, relative: bool, sigma: float) -> Floats:
    clean = 0.02 * GRID + 20.0
    noise = rng.normal(0, sigma, len(GRID))
    return clean * (1 + noise) if relative else clean + 20.0 * noise


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_intervals_hold_as_often_as_they_say(relative: bool, confidence: float) -> None:
    """1000 synthetic fits; allowed are 3 standard deviations of the binomial count (95 %: 93 to 97 in a hundred)."""
    rng, trials = np.random.default_rng(20260131), 1000
    hits = np.zeros(2)
    for _ in range(trials):
        times = simulated(rng, relative, 0.03)
        line = LinearLatency(relative=relative, confidence=confidence, holdout=0).fit(GRID, times)
        hits += [
            line.alpha_interval_[0] <= 0.02 <= line.alpha_interval_[1],
            line.beta_interval_[0] <= 20.0 <= line.beta_interval_[1],
        ]
    tolerance = 3 * math.sqrt(confidence * (1 - confidence) / trials)
    np.testing.assert_allclose(hits / trials, confidence, atol=tolerance)


@pytest.mark.parametrize("relative", [False, True])
def test_a_negative_intercept_becomes_a_line_through_the_origin(relative: bool) -> None:
    sizes = np.array([10.0, 20.0, 30.0, 40.0])
    line = LinearLatency(relative=relative).fit(sizes, 2.0 * sizes - 10.0 + np.array([0.1, -0.1, -0.1, 0.1]))
    assert line.through_origin_
    assert line.beta_ == 0.0
    assert line.beta_interval_[0] == 0.0
    assert line.degrees_ == 3
    if not relative:
        assert line.alpha_ == pytest.approx((10 * 10.1 + 20 * 29.9 + 30 * 49.9 + 40 * 70.1) / 3000)


def test_a_line_through_the_origin_by_hand() -> None:
    """x = 1, 2, 3 and t = 1, 4, 7: free β = −2; α = Σxt/Σx² = 30/14; s² = (66 − 30²/14)/2; Var α = s²/14."""
    line = LinearLatency().fit([1, 2, 3], [1, 4, 7])
    assert line.alpha_ == pytest.approx(30 / 14)
    assert line.noise_variance_ == pytest.approx((66 - 900 / 14) / 2)
    np.testing.assert_allclose(line.covariance_, [[line.noise_variance_ / 14, 0], [0, 0]])


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("time", [0.1, 1e-6, 1 / 3, 7e8])
def test_times_all_alike_are_a_flat_line(relative: bool, time: float) -> None:
    for points in range(3, 21):  # for some of them the slope is −1e-32 before it is rounded off
        line = LinearLatency(relative=relative).fit(1.7 * np.arange(1.0, points + 1), [time] * points)
        assert line.alpha_ == 0.0
        assert line.beta_ == pytest.approx(time, rel=1e-12)
        assert line.r_squared_ == 1.0
        assert line.heldout_median_error_ == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("holdout", [0.1, 0.2, 0.5])
def test_the_held_out_error_is_that_of_a_line_through_the_other_points(relative: bool, holdout: float) -> None:
    rng = np.random.default_rng(8)
    sizes = np.repeat(np.geomspace(10, 1e4, 23), 2)
    times = (0.01 * sizes + 5.0) * (1 + rng.normal(0, 0.05, len(sizes)))
    order = rng.permutation(len(sizes))
    sizes, times = sizes[order], times[order]
    out = {size for place, size in enumerate(sorted(set(sizes))[1:-1]) if place % round(1 / holdout) == 0}
    training = np.array([size not in out for size in sizes])
    second = LinearLatency(relative=relative, holdout=0).fit(sizes[training], times[training])
    errors = np.abs(second.predict(sizes[~training]) - times[~training]) / times[~training]
    line = LinearLatency(relative=relative, holdout=holdout).fit(sizes, times)
    assert line.heldout_median_error_ == pytest.approx(float(np.median(errors)), rel=1e-12)


def test_r_squared_by_hand() -> None:
    """Plain: of t = 10, 13, 13, 16 (mean 13, spread 18), 1.8 is left. Relative: the same sums, weighed by 1/fitted²."""
    sizes, times = np.array([0.0, 1, 2, 3]), np.array([10.0, 13, 13, 16])
    assert LinearLatency().fit(sizes, times).r_squared_ == pytest.approx(1 - 1.8 / 18)
    line = LinearLatency(relative=True).fit(sizes, times)
    weight = 1 / line.predict(sizes) ** 2
    mean = (weight * times).sum() / weight.sum()
    remaining, total = (weight * (times - line.predict(sizes)) ** 2).sum(), (weight * (times - mean) ** 2).sum()
    assert line.r_squared_ == pytest.approx(1 - remaining / total)
    assert line.r_squared_ != pytest.approx(0.9, abs=1e-4)


@pytest.mark.parametrize(("sizes", "holdout"), [([1, 1, 2, 2], 0.2), ([1, 2, 3, 4], 0.0)])
def test_without_a_size_to_hold_out_the_error_is_nan(sizes: list[float], holdout: float) -> None:
    times = [5.0 + size for size in sizes]
    assert math.isnan(LinearLatency(holdout=holdout).fit(sizes, times).heldout_median_error_)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"holdout": 0.6}, "holdout: got 0.6, expected a share from 0 to 0.5"),
        ({"holdout": -0.1}, "holdout: got -0.1, expected a share from 0 to 0.5"),
        ({"holdout": math.nan}, "holdout: got nan, expected a share from 0 to 0.5"),
        ({"confidence": 1.0}, "confidence: got 1.0, expected a number above 0 and below 1"),
        ({"confidence": 0.0}, "confidence: got 0.0, expected a number above 0 and below 1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(CannotFit) as error:
        LinearLatency(**settings).fit([1, 2, 3], [1, 2, 3])  # type: ignore[arg-type]
    assert str(error.value) == message


def rounds(rng: np.random.Generator, between: float, within: float, count: int = 30) -> list[np.ndarray]:
    """Rounds of 20 to 60 steps, each with an effect of its own."""
    sizes = rng.integers(20, 61, count)
    return [rng.normal(0, between) + within * rng.standard_normal(size) for size in sizes]


def test_two_groups_by_hand() -> None:
    """Means 1 and 5 have a variance of 8; scatter explains the mean of 2/2 and 8/2, which is 2.5."""
    assert deviation_between([np.array([0.0, 2.0]), np.array([3.0, 7.0])]) == pytest.approx(5.5**0.5)


@pytest.mark.parametrize("between", [0.01, 0.03, 0.1])
def test_the_variance_between_rounds_is_found_on_average(between: float) -> None:
    rng = np.random.default_rng(1)
    result = [deviation_between(rounds(rng, between, 0.03)) ** 2 for _ in range(400)]
    assert np.mean(result) == pytest.approx(between**2, rel=0.06)


def test_another_round_lies_in_its_interval_as_often_as_it_says() -> None:
    """Student's t with as many degrees of freedom as rounds less one, 95 % of 2,000 further rounds."""
    rng, count = np.random.default_rng(2), 12
    reach, covered = student_quantile(0.95, count - 1), 0
    for _ in range(2000):
        expected = rounds(rng, 0.03, 0.02, count)
        centre = np.mean([item.mean() for item in expected])
        covered += abs(rng.normal(0, 0.03) - centre) <= reach * deviation_between(expected) * (1 + 1 / count) ** 0.5
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)


def test_scatter_alone_is_no_variation_between_rounds() -> None:
    rng = np.random.default_rng(3)
    assert np.mean([deviation_between(rounds(rng, 0.0, 0.03)) for _ in range(200)]) < 0.03 / 40**0.5 / 2


@pytest.mark.parametrize("groups", [[], [np.array([1.0, 2.0])], [np.array([1.0]), np.array([5.0])]])
def test_fewer_than_two_groups_vary_by_nothing_that_is_known(groups: list[np.ndarray]) -> None:
    assert deviation_between(groups) == 0.0


POWERS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_a_line_stays_one_line_under_noise() -> None:
    generator = np.random.default_rng(4)
    times = [(3e-6 * x + 2e-5) * generator.normal(1, 0.01) for x in POWERS]
    (line,) = fit_piecewise(POWERS, times)
    assert line.alpha == pytest.approx(3e-6, rel=0.02)
    assert line.beta == pytest.approx(2e-5, rel=0.02)
    assert (line.low, line.high) == (1, 512)
    assert line.fit is not None


def test_a_knee_is_found_where_it_is() -> None:
    """Flat while weights are read, then by the token: max(50, 2·x) µs, which turns at 25."""
    (flat, rising) = fit_piecewise(POWERS, [max(50.0, 2.0 * x) for x in POWERS])
    assert (flat.low, flat.high) == (1, 16)
    assert (flat.alpha, flat.beta) == (0.0, pytest.approx(50.0))
    assert (rising.low, rising.high) == (32, 512)
    assert rising.alpha == pytest.approx(2.0)
    assert rising.beta == pytest.approx(0.0, abs=1e-6)


def test_two_knees_and_a_step() -> None:
    sizes = list(range(1, 25))
    times = [10.0 + x if x < 9 else 40.0 + x if x < 17 else 100.0 + 3 * x for x in sizes]
    lines = fit_piecewise(sizes, times)
    assert [(line.low, line.high) for line in lines] == [(1, 8), (9, 16), (17, 24)]
    assert max(line.worst_residual for line in lines) < 1e-9


def test_what_does_not_hold_is_told() -> None:
    (line,) = fit_piecewise([1, 2, 3, 4], [1.0, 3.0, 1.0, 3.0], max_pieces=1)
    assert line.worst_residual > 0.3


def test_times_that_fall_make_a_level() -> None:
    (line,) = fit_piecewise([1, 2, 3], [1.02, 1.01, 1.0])
    assert (line.alpha, line.fit) == (0.0, None)
    assert line.beta == pytest.approx(1.01)


def test_too_few_sizes() -> None:
    with pytest.raises(CannotFit, match="3 different sizes"):
        fit_piecewise([1, 1, 2], [1.0, 1.0, 2.0])


SIZES = np.array([1.0, 2.0, 5.0, 8.0, 16.0, 40.0, 64.0, 128.0])
TIMES = (3.0 * SIZES + 7.0) * (1 + 0.01 * np.array([1, -2, 0, 1, 2, -1, -1, 1]))


@pytest.fixture(params=[False, True], ids=["equal", "relative"])
def relative(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def learnt(relative: bool, sizes: Floats = SIZES, times: Floats = TIMES) -> dict[str, Any]:
    line = LinearLatency(relative=relative).fit(sizes, times)
    return {name: value for name, value in vars(line).items() if name.endswith("_")}


def test_predicting_before_fit_is_refused(relative: bool) -> None:
    with pytest.raises(NotFitted, match="fitted before") as error:
        LinearLatency(relative=relative).predict(1.0)
    assert isinstance(error.value, TwinError)


def test_a_failed_fit_keeps_what_was_learnt_before(relative: bool) -> None:
    line = LinearLatency(relative=relative).fit(SIZES, TIMES)
    before = dict(vars(line))
    with pytest.raises(CannotFit):
        line.fit(SIZES, -TIMES)
    assert vars(line) == before


def test_fit_is_deterministic_and_blind_to_the_order_of_points(relative: bool) -> None:
    order = np.random.default_rng(5).permutation(len(SIZES))
    first, again, shuffled = learnt(relative), learnt(relative), learnt(relative, SIZES[order], TIMES[order])
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value)
        np.testing.assert_allclose(shuffled[name], value, rtol=1e-9, atol=1e-18, err_msg=name)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_predictions_have_the_shape_of_the_sizes(relative: bool, shape: tuple[int, ...]) -> None:
    predicted = LinearLatency(relative=relative).fit(SIZES, TIMES).predict(np.ones(shape))
    assert np.shape(predicted) == shape
    assert np.asarray(predicted).dtype == np.float64


BROKEN: dict[str, tuple[list[float], list[float], str]] = {
    "one point": ([1.0], [1.0], "sizes: got 1, expected at least 3 points"),
    "two points": ([1.0, 2.0], [1.0, 2.0], "sizes: got 2, expected at least 3 points"),
    "no points": ([], [], "sizes: got 0, expected at least 3 points"),
    "one size": ([4.0, 4.0, 4.0], [1.0, 2.0, 3.0], "sizes: got 4.0, expected sizes that differ"),
    "lengths differ": ([1.0, 2.0, 3.0], [1.0, 2.0], "times: got 2, expected as many times as sizes (3)"),
    "NaN time": ([1.0, 2.0, 3.0], [1.0, np.nan, 3.0], "times[1]: got nan, expected a finite number, above 0"),
    "NaN size": ([1.0, np.nan, 3.0], [1.0, 2.0, 3.0], "sizes[1]: got nan, expected a finite number, 0 or more"),
    "infinite": ([1.0, 2.0, np.inf], [1.0, 2.0, 3.0], "sizes[2]: got inf, expected a finite number, 0 or more"),
    "negative time": ([1.0, 2.0, 3.0], [1.0, -2.0, 3.0], "times[1]: got -2.0, expected a finite number, above 0"),
    "time of zero": ([1.0, 2.0, 3.0], [0.0, 2.0, 3.0], "times[0]: got 0.0, expected a finite number, above 0"),
    "negative size": ([-1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "sizes[0]: got -1.0, expected a finite number, 0 or more"),
    "time too long": ([1.0, 2.0, 3.0], [1.0, 2.0, 1e200], "times: got 1e+200, expected numbers from 1e-100 to 1e+100"),
    "time too short": (
        [1.0, 2.0, 3.0],
        [1e-200, 2.0, 3.0],
        "times: got 1e-200, expected numbers from 1e-100 to 1e+100",
    ),
    "size too large": ([1.0, 2.0, 1e200], [1.0, 2.0, 3.0], "sizes: got 1e+200, expected numbers up to 1e+100"),
    "sizes too near": ([0.0, 1e-200, 2e-200], [1.0, 2.0, 3.0], "sizes: got 0.0, expected sizes that differ"),
    "falls": ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], "alpha: got -"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_fitted_is_refused_in_one_line(relative: bool, name: str) -> None:
    sizes, times, message = BROKEN[name]
    with pytest.raises(CannotFit) as error:
        LinearLatency(relative=relative).fit(sizes, times)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, BadInput)


@pytest.mark.parametrize("column", ["sizes", "times"])
@pytest.mark.parametrize("values", [[[1.0], [2.0], [3.0]], ["a", "b", "c"], [[1.0], [2.0, 3.0]], 5.0])
def test_what_is_no_flat_list_is_refused_in_one_line(relative: bool, column: str, values: Any) -> None:
    columns: dict[str, Any] = {"sizes": [1.0, 2.0, 3.0], "times": [1.0, 2.0, 3.0]} | {column: values}
    with pytest.raises(CannotFit, match=rf"^{column}: .*expected a flat list of numbers$"):
        LinearLatency(relative=relative).fit(columns["sizes"], columns["times"])
