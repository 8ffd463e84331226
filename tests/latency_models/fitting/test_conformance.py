"""Promises of every estimator (latency_models.fitting.estimator). A new estimator joins by one line in CASES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from latency_models.fitting.estimator import CannotFit, Estimator, Floats, NotFitted
from latency_models.fitting.linear import LinearLatency
from workloads.errors import BadInput, TwinError


@dataclass(frozen=True)
class Case:
    """An estimator, and measurements that it can be fitted to."""

    make: Callable[[], Any]
    sizes: Floats
    times: Floats


SIZES = np.array([1.0, 2.0, 5.0, 8.0, 16.0, 40.0, 64.0, 128.0])
NOISE = 1 + 0.01 * np.array([1, -2, 0, 1, 2, -1, -1, 1])
TIMES = (3.0 * SIZES + 7.0) * NOISE

CASES = {
    "linear": Case(LinearLatency, SIZES, TIMES),
    "linear-relative": Case(lambda: LinearLatency(relative=True), SIZES, TIMES),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    result: Case = request.param
    return result


def learnt(estimator: Estimator) -> dict[str, Any]:
    return {name: value for name, value in vars(estimator).items() if name.endswith("_")}


def same(first: dict[str, Any], second: dict[str, Any], rtol: float = 0.0) -> None:
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=rtol, atol=1e-18, err_msg=name)


def test_predicting_before_fit_is_refused(case: Case) -> None:
    with pytest.raises(NotFitted, match="fitted before") as error:
        case.make().predict(1.0)
    assert isinstance(error.value, TwinError)


def test_a_failed_fit_keeps_what_was_learnt_before(case: Case) -> None:
    estimator = case.make().fit(case.sizes, case.times)
    before = dict(learnt(estimator))
    with pytest.raises(CannotFit):
        estimator.fit(case.sizes, -case.times)
    same(learnt(estimator), before)


def test_fit_is_deterministic_and_blind_to_the_order_of_points(case: Case) -> None:
    first, again = case.make().fit(case.sizes, case.times), case.make().fit(case.sizes, case.times)
    same(learnt(first), learnt(again))
    order = np.random.default_rng(5).permutation(len(case.sizes))
    shuffled = case.make().fit(case.sizes[order], case.times[order])
    same(learnt(first), learnt(shuffled), rtol=1e-9)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_predictions_have_the_shape_of_the_sizes(case: Case, shape: tuple[int, ...]) -> None:
    estimator = case.make().fit(case.sizes, case.times)
    predicted = estimator.predict(np.ones(shape))
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
def test_what_cannot_be_fitted_is_refused_in_one_line(case: Case, name: str) -> None:
    sizes, times, message = BROKEN[name]
    with pytest.raises(CannotFit) as error:
        case.make().fit(sizes, times)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, BadInput)


@pytest.mark.parametrize("column", ["sizes", "times"])
@pytest.mark.parametrize("values", [[[1.0], [2.0], [3.0]], ["a", "b", "c"], [[1.0], [2.0, 3.0]], 5.0])
def test_what_is_no_flat_list_is_refused_in_one_line(case: Case, column: str, values: Any) -> None:
    columns: dict[str, Any] = {"sizes": [1.0, 2.0, 3.0], "times": [1.0, 2.0, 3.0]} | {column: values}
    with pytest.raises(CannotFit, match=rf"^{column}: .*expected a flat list of numbers$"):
        case.make().fit(columns["sizes"], columns["times"])
