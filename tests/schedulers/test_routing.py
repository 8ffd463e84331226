"""Routers: which engine, and that ties and chance are even."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from scipy.stats import chisquare

from schedulers.routing import LeastLoaded, PowerOfTwo, RoundRobin, router


def idle(engine: int) -> int:
    return 0


def unasked(engine: int) -> int:
    raise AssertionError("the load does not matter here")


def test_round_robin_goes_around() -> None:
    policy = RoundRobin()
    assert [policy.choose([4, 7, 9], unasked) for _ in range(7)] == [4, 7, 9, 4, 7, 9, 4]


def test_least_loaded_takes_the_least() -> None:
    loads = {0: 30, 1: 10, 2: 20}
    policy = LeastLoaded()
    assert [policy.choose([0, 1, 2], loads.__getitem__) for _ in range(4)] == [1] * 4
    assert [policy.choose([0, 2], loads.__getitem__) for _ in range(4)] == [2] * 4


def test_among_equals_the_turn_goes_around() -> None:
    policy = LeastLoaded()
    assert [policy.choose([0, 1, 2], idle) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_of_two_equals_beside_a_busy_one_both_are_used() -> None:
    policy = LeastLoaded()
    chosen = Counter(policy.choose([0, 1, 2], {0: 5, 1: 5, 2: 9}.__getitem__) for _ in range(300))
    # Turns start at 0, 1, 2; from 2 on the next equal is 0.
    assert chosen == {0: 200, 1: 100}


@pytest.mark.parametrize("policy", [LeastLoaded(), PowerOfTwo(unasked)])
def test_a_single_engine_is_not_asked_for_its_load(policy: LeastLoaded | PowerOfTwo) -> None:
    assert policy.choose([3], unasked) == 3


def test_power_of_two_asks_two_different_engines_and_takes_the_lighter() -> None:
    random = Random(1)
    loads = {3: 5, 4: 1, 6: 9, 8: 4}
    policy = PowerOfTwo(random.randrange)
    asked: list[int] = []

    def ask(engine: int) -> int:
        asked.append(engine)
        return loads[engine]

    pairs = Counter[frozenset[int]]()
    for _ in range(6000):
        asked.clear()
        chosen = policy.choose(list(loads), ask)
        assert len(set(asked)) == 2
        assert chosen == min(asked, key=loads.__getitem__)
        pairs[frozenset(asked)] += 1
    assert len(pairs) == 6
    assert chisquare(list(pairs.values())).pvalue > 1e-3


def test_power_of_two_with_equal_loads_is_even() -> None:
    policy = PowerOfTwo(Random(2).randrange)
    chosen = Counter(policy.choose(range(5), idle) for _ in range(5000))
    assert chisquare([chosen[engine] for engine in range(5)]).pvalue > 1e-3


def test_routers_by_name() -> None:
    draw = Random(0).randrange
    assert isinstance(router("round_robin", draw), RoundRobin)
    assert isinstance(router("least_loaded", draw), LeastLoaded)
    assert isinstance(router("power_of_two", draw), PowerOfTwo)
    with pytest.raises(ValueError, match="found 'random'"):
        router("random", draw)
