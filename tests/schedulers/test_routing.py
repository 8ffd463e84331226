"""Routers: which engine, and that ties and chance are even."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from scipy.stats import chisquare

from schedulers.routing import ROUTERS, LeastLoaded, PowerOfTwo, RoundRobin
from workloads.request import Request

REQUEST = Request(0, 0.0, 10, 5)


class Engine:
    """An engine whose load is given, and noted when it is asked for; nothing else may be asked."""

    def __init__(self, load: int, asked: list[Engine] | None = None) -> None:
        self._load, self._asked = load, asked

    @property
    def load(self) -> int:
        if self._asked is not None:
            self._asked.append(self)
        return self._load

    @property
    def free_blocks(self) -> int:
        raise AssertionError("free blocks do not matter here")

    def cached_prefix_tokens(self, request: Request) -> int:
        raise AssertionError("the prefix cache does not matter here")


class Silent(Engine):
    """An engine whose load may not be asked for."""

    def __init__(self) -> None:
        super().__init__(0)

    @property
    def load(self) -> int:
        raise AssertionError("the load does not matter here")


def unasked(size: int) -> int:
    raise AssertionError("no chance is needed here")


def test_round_robin_goes_around() -> None:
    policy, (a, b, c) = RoundRobin(), (Silent(), Silent(), Silent())
    assert [policy.choose(REQUEST, [a, b, c]) for _ in range(7)] == [a, b, c, a, b, c, a]


def test_least_loaded_takes_the_least() -> None:
    policy, (a, b, c) = LeastLoaded(), (Engine(30), Engine(10), Engine(20))
    assert [policy.choose(REQUEST, [a, b, c]) for _ in range(4)] == [b] * 4
    assert [policy.choose(REQUEST, [a, c]) for _ in range(4)] == [c] * 4


def test_among_equals_the_turn_goes_around() -> None:
    policy, engines = LeastLoaded(), [Engine(0) for _ in range(3)]
    assert [policy.choose(REQUEST, engines) for _ in range(6)] == engines * 2


def test_of_two_equals_beside_a_busy_one_both_are_used() -> None:
    policy, (a, b, c) = LeastLoaded(), (Engine(5), Engine(5), Engine(9))
    chosen = Counter(policy.choose(REQUEST, [a, b, c]) for _ in range(300))
    # Turns start at a, b, c; from c on the next equal is a.
    assert chosen == {a: 200, b: 100}


@pytest.mark.parametrize("policy", [LeastLoaded(), PowerOfTwo(unasked)])
def test_a_single_engine_is_not_asked_for_its_load(policy: LeastLoaded | PowerOfTwo) -> None:
    engine = Silent()
    assert policy.choose(REQUEST, [engine]) is engine


def test_power_of_two_asks_two_different_engines_and_takes_the_lighter() -> None:
    random = Random(1)
    asked: list[Engine] = []
    loads = {Engine(load, asked): load for load in (5, 1, 9, 4)}
    policy = PowerOfTwo(random.randrange)
    pairs = Counter[frozenset[Engine]]()
    for _ in range(6000):
        asked.clear()
        chosen = policy.choose(REQUEST, list(loads))
        assert len(set(asked)) == 2
        assert chosen is min(asked, key=loads.__getitem__)
        pairs[frozenset(asked)] += 1
    assert len(pairs) == 6
    assert chisquare(list(pairs.values())).pvalue > 1e-3


def test_power_of_two_with_equal_loads_is_even() -> None:
    policy, engines = PowerOfTwo(Random(2).randrange), [Engine(0) for _ in range(5)]
    chosen = Counter(policy.choose(REQUEST, engines) for _ in range(5000))
    assert chisquare([chosen[engine] for engine in engines]).pvalue > 1e-3


def test_routers_by_name() -> None:
    draw = Random(0).randrange
    kinds = {"least_loaded": LeastLoaded, "power_of_two": PowerOfTwo, "round_robin": RoundRobin}
    assert {name: type(make(draw)) for name, make in ROUTERS.items()} == kinds
    with pytest.raises(ValueError, match="expected one of least_loaded, power_of_two, round_robin, found 'random'"):
        ROUTERS.select("random")
