"""Routers: which engine, and that ties and chance are even."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from schedulers.load_tree import LoadTree
from schedulers.routing import ROUTERS, LeastLoaded, PowerOfTwo, RoundRobin, own_method
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


@given(st.data(), st.integers(1, 40), st.integers(1, 4))
def test_told_of_every_load_least_loaded_chooses_as_when_it_looks_at_all(
    data: st.DataObject, size: int, largest: int
) -> None:
    """Few different loads, so that most choices are among equals."""
    load = st.integers(0, largest)
    engines = [Engine(each) for each in data.draw(st.lists(load, min_size=size, max_size=size))]
    looking, told = LeastLoaded(), LeastLoaded()
    loads = told.follow(engines)
    for position, changed in data.draw(st.lists(st.tuples(st.integers(0, size - 1), load), max_size=60)):
        assert told.choose(REQUEST, engines) is looking.choose(REQUEST, engines)
        engines[position]._load = changed
        loads.set(position, changed)


def test_told_of_every_load_least_loaded_asks_no_engine() -> None:
    policy, asked = LeastLoaded(), list[Engine]()
    engines = [Engine(5, asked), Engine(3, asked), Engine(4, asked)]
    policy.follow(engines)
    asked.clear()
    assert policy.choose(REQUEST, engines) is engines[1]
    assert not asked


@given(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.integers(0, 69))
def test_a_load_tree_finds_the_first_of_the_least_from_any_position(loads: list[int], start: int) -> None:
    start %= len(loads)
    around = [*range(start, len(loads)), *range(start)]
    assert LoadTree(loads).first_least(start) == min(around, key=loads.__getitem__)


def test_only_what_a_router_says_itself_is_believed() -> None:
    """A subclass that chooses otherwise inherits the method too."""

    class Router:
        def choose(self, request: Request, engines: list[Engine]) -> Engine:
            return engines[0]

        def requests_elsewhere(self, position: int, size: int) -> int:
            return position

    class Other(Router):
        def choose(self, request: Request, engines: list[Engine]) -> Engine:
            return engines[-1]

    found = own_method(Router(), "requests_elsewhere")
    assert found is not None
    assert found(3, 4) == 3
    assert own_method(Other(), "requests_elsewhere") is None
    assert own_method(PowerOfTwo(unasked), "follow") is None


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.data())
def test_requests_go_elsewhere_for_as_long_as_a_router_says(loads: list[int], data: st.DataObject) -> None:
    """Each request adds load where it goes, and loads of other engines may sink at any time."""
    size, position = len(loads), data.draw(st.integers(0, len(loads) - 1))
    engines = [Engine(load) for load in loads]
    told, around = LeastLoaded(), RoundRobin()
    followed = told.follow(engines)
    for _ in range(data.draw(st.integers(0, 20))):
        around.choose(REQUEST, engines)
    elsewhere = told.requests_elsewhere(position, size), around.requests_elsewhere(position, size)
    for index in range(max(elsewhere)):
        chosen = told.choose(REQUEST, engines), around.choose(REQUEST, engines)
        assert index >= elsewhere[0] or chosen[0] is not engines[position]
        assert index >= elsewhere[1] or chosen[1] is not engines[position]
        sinking = data.draw(st.sampled_from([i for i in range(size) if i != position]))
        for i, change in ((engines.index(chosen[0]), 2), (sinking, -1)):
            if i != position:
                engines[i]._load = max(engines[i]._load + change, 0)
                followed.set(i, engines[i]._load)
