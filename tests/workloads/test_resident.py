"""Requests as a random decode step finds them."""

from __future__ import annotations

import numpy as np
import pytest

from workloads.lengths import Fixed, Geometric, LogNormal, Uniform
from workloads.pairs import Independent, JointEmpirical, LengthPairs

SIZE = 40_000


@pytest.mark.parametrize(
    "lengths",
    [
        Independent(Geometric(50), Geometric(20)),
        Independent(Uniform(0, 100), Uniform(1, 60)),
        Independent(Geometric(50), LogNormal(100, 1.2)),
        Independent(Fixed(7), Fixed(9)),
        JointEmpirical([5, 500, 50], [3, 200, 10]),
    ],
    ids=["geometric", "uniform", "log-normal", "fixed", "joint"],
)
def test_load_at_a_uniform_age_is_the_renewal_load(lengths: LengthPairs) -> None:
    rng = np.random.default_rng(11)
    prefill, decode = lengths.sample_resident(rng, SIZE)
    load = prefill + rng.integers(0, decode)
    assert abs(load.mean() - lengths.renewal_load()) <= 5 * load.std() / np.sqrt(SIZE) + 1e-9


@pytest.mark.parametrize("age", [0, 1, 9, 40, 10_000])
def test_load_beyond_an_age_is_what_older_requests_carry(age: int) -> None:
    joint = JointEmpirical([5, 500, 50], [3, 200, 10])
    pairs = zip([5, 500, 50], [3, 200, 10], strict=True)
    loads = [prompt + step for prompt, decode in pairs for step in range(age, decode)]
    assert joint.load_beyond(age) == pytest.approx(sum(loads) / 213)
    apart = joint.independent()
    assert apart.load_beyond(0) == pytest.approx(apart.renewal_load())
    # Geometric: ages are geometric from 0, so beyond k there is (1 - p)^k, with k more tokens each.
    geometric = Independent(Geometric(50), Geometric(20))
    assert geometric.load_beyond(age) == pytest.approx(0.95**age * (50 + age + 19), abs=1e-9)


def test_long_answers_are_met_in_proportion() -> None:
    rng = np.random.default_rng(3)
    prefill, decode = JointEmpirical([1, 2], [10, 30]).sample_resident(rng, SIZE)
    share = float((decode == 30).mean())
    assert abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / SIZE)
    assert ((prefill == 2) == (decode == 30)).all()
