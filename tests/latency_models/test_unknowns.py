"""Named unknowns and their scores."""

from __future__ import annotations

import numpy as np
import pytest

from latency_models.step_time import Unknown, draw_scores

OVERHEAD = Unknown("overhead", "host time between steps", "assumed", 0.5)
FIT = tuple(Unknown(f"fit.{i}", "coefficients", "fitted") for i in range(3))


def test_a_name_has_one_score_whatever_stands_beside_it() -> None:
    separate = draw_scores([OVERHEAD], np.random.default_rng(3))
    among = draw_scores([*FIT, OVERHEAD], np.random.default_rng(3))
    assert among["overhead"] == separate["overhead"]
    assert len(set(among.values())) == 4
    assert draw_scores([OVERHEAD], np.random.default_rng(4)) != separate


def test_scores_are_standard_normal_and_independent() -> None:
    rng = np.random.default_rng(0)
    scores = np.array([list(draw_scores(FIT, rng).values()) for _ in range(2000)])
    assert np.abs(scores.mean(axis=0)).max() < 0.1
    assert np.cov(scores.T) == pytest.approx(np.eye(3), abs=0.12)


def test_factors_are_as_far_from_one_upwards_as_downwards() -> None:
    assert OVERHEAD.factor(0.0) == 1.0
    assert OVERHEAD.factor(1.3) * OVERHEAD.factor(-1.3) == pytest.approx(1.0)
    assert OVERHEAD.factor(1.0) == pytest.approx(np.exp(0.5))


def test_a_group_is_the_name_before_the_dot() -> None:
    assert {unknown.group for unknown in FIT} == {"fit"}
    assert OVERHEAD.group == "overhead"
