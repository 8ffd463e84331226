"""Routers: which engine, and that ties and chance are even."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from schedulers.router_views import LoadTree
from schedulers.routing import (
    ROUTERS,
    ConsistentHashing,
    LeastLoaded,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    SessionAffinity,
    ShortestExpectedDelay,
    WeightedLeastLoaded,
    WeightedRandom,
    draws,
    own_method,
    reads_caches,
    routing_key,
)
from workloads.request import Request

REQUEST = Request(0, 0.0, 10, 5)


class Engine:
    """An engine of which only what is stated may be asked; it is noted in `queried` when asked for its load."""

    def __init__(
        self, load: int | None, queried: list[Engine] | None = None, index: int = 0, cached: int | None = None,
        speed: float | None = None,
    ) -> None:  # fmt: skip
        self._load = load
        self._queried = [] if queried is None else queried
        self.index = index
        self.cached = cached
        if speed is not None:
            self.speed = speed

    @property
    def load(self) -> int:
        assert self._load is not None, "the load does not matter here"
        self._queried.append(self)
        return self._load

    def cached_prefix_tokens(self, request: Request) -> int:
        assert self.cached is not None, "the prefix cache does not matter here"
        return self.cached

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} does not matter here")


def unasked(size: int) -> int:
    raise AssertionError("no chance is needed here")


def test_round_robin_goes_around() -> None:
    policy, (a, b, c) = RoundRobin(), (Engine(None), Engine(None), Engine(None))
    assert [policy.choose(REQUEST, [a, b, c]) for _ in range(7)] == [a, b, c, a, b, c, a]


def test_least_loaded_takes_the_least() -> None:
    policy, (a, b, c) = LeastLoaded(), (Engine(30), Engine(10), Engine(20))
    assert [policy.choose(REQUEST, [a, b, c]) for _ in range(4)] == [b] * 4
    assert [policy.choose(REQUEST, [a, c]) for _ in range(4)] == [c] * 4


def test_of_two_equals_beside_a_busy_one_both_are_used() -> None:
    policy, (a, b, c) = LeastLoaded(), (Engine(5), Engine(5), Engine(9))
    choice = Counter(policy.choose(REQUEST, [a, b, c]) for _ in range(300))
    # Turns start at a, b, c; from c on the next equal is a.
    assert choice == {a: 200, b: 100}


@pytest.mark.parametrize("policy", [LeastLoaded(), PowerOfTwo(unasked)])
def test_a_single_engine_is_not_asked_for_its_load(policy: LeastLoaded | PowerOfTwo) -> None:
    engine = Engine(None)
    assert policy.choose(REQUEST, [engine]) is engine


def test_power_of_two_asks_two_different_engines_and_takes_the_lighter() -> None:
    random = Random(1)
    queried: list[Engine] = []
    loads = {Engine(load, queried): load for load in (5, 1, 9, 4)}
    policy = PowerOfTwo(random.randrange)
    pairs = Counter[frozenset[Engine]]()
    for _ in range(6000):
        queried.clear()
        choice = policy.choose(REQUEST, list(loads))
        assert len(set(queried)) == 2
        assert choice is min(queried, key=loads.__getitem__)
        pairs[frozenset(queried)] += 1
    assert len(pairs) == 6
    assert chisquare(list(pairs.values())).pvalue > 1e-3


def test_power_of_two_with_equal_loads_is_even() -> None:
    policy, engines = PowerOfTwo(Random(2).randrange), [Engine(0) for _ in range(5)]
    choice = Counter(policy.choose(REQUEST, engines) for _ in range(5000))
    assert chisquare([choice[engine] for engine in engines]).pvalue > 1e-3


def test_routers_by_name() -> None:
    draw = Random(0).randrange
    kinds = {
        "least_loaded": LeastLoaded, "power_of_two": PowerOfTwo, "round_robin": RoundRobin, "prefix_aware": PrefixAware,
        "session_affinity": SessionAffinity, "consistent_hashing": ConsistentHashing,
        "weighted_least_loaded": WeightedLeastLoaded, "shortest_expected_delay": ShortestExpectedDelay,
        "weighted_random": WeightedRandom,
    }  # fmt: skip
    assert {name: type(make(draw)) for name, make in ROUTERS.items()} == kinds
    assert {name for name in kinds if draws(name)} == {"power_of_two", "weighted_random"}
    assert {name for name in kinds if reads_caches(name)} == {"prefix_aware"}
    with pytest.raises(ValueError, match=r"expected one of least_loaded, power_of_two, .*, found 'random'"):
        ROUTERS.select("random")


@given(st.data(), st.integers(1, 40), st.integers(1, 4))
def test_told_of_every_load_least_loaded_chooses_as_when_it_looks_at_all(
    data: st.DataObject, size: int, largest: int
) -> None:
    """Few different loads, so that most choices are among equals."""
    load = st.integers(0, largest)
    engines = [Engine(tokens) for tokens in data.draw(st.lists(load, min_size=size, max_size=size))]
    looking, informed = LeastLoaded(), LeastLoaded()
    loads = informed.follow(engines)
    for position, changed in data.draw(st.lists(st.tuples(st.integers(0, size - 1), load), max_size=60)):
        assert informed.choose(REQUEST, engines) is looking.choose(REQUEST, engines)
        engines[position]._load = changed
        loads.set(position, changed)


def test_told_of_every_load_least_loaded_asks_no_engine() -> None:
    policy, queried = LeastLoaded(), list[Engine]()
    engines = [Engine(5, queried), Engine(3, queried), Engine(4, queried)]
    policy.follow(engines)
    queried.clear()
    assert policy.choose(REQUEST, engines) is engines[1]
    assert not queried


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

    result = own_method(Router(), "requests_elsewhere")
    assert result is not None
    assert result(3, 4) == 3
    assert own_method(Other(), "requests_elsewhere") is None
    assert own_method(PowerOfTwo(unasked), "follow") is None


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.data())
def test_requests_go_elsewhere_for_as_long_as_a_router_says(loads: list[int], data: st.DataObject) -> None:
    """Each request adds load where it goes, and loads of other engines may sink at any time."""
    size, position = len(loads), data.draw(st.integers(0, len(loads) - 1))
    engines = [Engine(load) for load in loads]
    informed, around = LeastLoaded(), RoundRobin()
    followed = informed.follow(engines)
    for _ in range(data.draw(st.integers(0, 20))):
        around.choose(REQUEST, engines)
    elsewhere = informed.requests_elsewhere(position, size), around.requests_elsewhere(position, size)
    for index in range(max(elsewhere)):
        choice = informed.choose(REQUEST, engines), around.choose(REQUEST, engines)
        assert index >= elsewhere[0] or choice[0] is not engines[position]
        assert index >= elsewhere[1] or choice[1] is not engines[position]
        sinking = data.draw(st.sampled_from([i for i in range(size) if i != position]))
        for i, change in ((engines.index(choice[0]), 2), (sinking, -1)):
            if i != position:
                engines[i]._load = max(engines[i]._load + change, 0)
                followed.set(i, engines[i]._load)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 100)), min_size=2, max_size=9),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.integers(0, 20),
)
def test_the_prefix_counts_against_the_load_with_its_weight(
    states: list[tuple[int, int]], weight: float, before: int
) -> None:
    router, engines = PrefixAware(unasked, weight), [Engine(load, cached=cached) for load, cached in states]
    for _ in range(before):
        router.choose(REQUEST, engines)
    choice = router.choose(REQUEST, engines)
    costs = {id(engine): engine.load - weight * engine.cached for engine in engines}
    assert costs[id(choice)] == min(costs.values())


def test_equal_costs_take_turns() -> None:
    router, engines = PrefixAware(unasked), [Engine(30, cached=20), Engine(10, cached=0), Engine(15, cached=5)]
    assert [engines.index(router.choose(REQUEST, engines)) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def of_session(session: int) -> Request:
    return Request(session, 0.0, 10, 5, session=session)


def test_a_session_stays_where_it_was() -> None:
    router, engines = SessionAffinity(unasked), [Engine(10, index=5), Engine(0, index=6), Engine(20, index=7)]
    assert router.choose(of_session(1), engines) is engines[1]
    engines[1]._load = 1000
    assert router.choose(of_session(1), engines) is engines[1]
    assert router.choose(of_session(2), engines) is engines[0]
    assert router.choose(of_session(1), [engines[0], engines[2]]) is engines[0], "its engine is down: it moves"
    assert router.choose(of_session(1), engines) is engines[0], "and stays there"


def test_a_session_leaves_an_engine_with_too_much_load() -> None:
    router, engines = SessionAffinity(unasked, load_factor=1.5), [Engine(0, index=0), Engine(1, index=1)]
    assert router.choose(of_session(1), engines) is engines[0]
    engines[0]._load = 3  # of a mean of 2
    assert router.choose(of_session(1), engines) is engines[0]
    engines[0]._load = 4
    assert router.choose(of_session(1), engines) is engines[1]


def test_the_oldest_sessions_are_forgotten() -> None:
    router, engines = SessionAffinity(unasked, max_sessions=2), [Engine(0, index=0), Engine(1, index=1)]
    for session in (1, 2, 1, 3):  # 2 is the one that was heard of longest ago
        assert router.choose(of_session(session), engines) is engines[0]
    engines[0]._load = 9
    assert [router.choose(of_session(session), engines).index for session in (1, 3, 2)] == [0, 0, 1]


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=12, unique=True), st.data())
def test_an_engine_that_fails_moves_its_own_keys_only(indices: list[int], data: st.DataObject) -> None:
    router, engines = ConsistentHashing(unasked), [Engine(0, index=index) for index in indices]
    failed = data.draw(st.sampled_from(engines))
    before = [router.choose(of_session(session), engines) for session in range(200)]
    up = [engine for engine in engines if engine is not failed]
    for session, engine in enumerate(before):
        now = router.choose(of_session(session), up)
        assert now is engine or engine is failed
    assert [router.choose(of_session(session), engines) for session in range(200)] == before


@given(st.integers(2, 20), st.integers(1, 400), st.sampled_from([1.0, 1.1, 1.25, 2.0]))
def test_loads_are_bounded(size: int, requests: int, factor: float) -> None:
    """With c times the mean as the bound, no engine gets more than ceil(c m / n) of m requests of one token each."""
    router, engines = ConsistentHashing(unasked, factor), [Engine(0, index=index) for index in range(size)]
    for i in range(requests):
        router.choose(of_session(i % 7), engines)._load += 1  # seven keys, so that hashing alone would overload some
        assert max(engine.load for engine in engines) <= factor * i / size + 1


def test_hashing_spreads_keys_evenly() -> None:
    """The share of an engine has a standard deviation of 1/n of 1/√(virtual nodes), besides that of the draw."""
    router = ConsistentHashing(unasked, load_factor=1000.0, virtual_nodes=400)
    engines = [Engine(1, index=index) for index in range(10)]
    counts = Counter(router.choose(of_session(session), engines).index for session in range(20_000))
    assert all(abs(counts[index] - 2000) < 4 * 2000 * (1 / 400 + 1 / 2000) ** 0.5 for index in range(10))


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (PrefixAware, {"weight": -1.0}),
        (SessionAffinity, {"load_factor": 0.9}),
        (SessionAffinity, {"max_sessions": 0}),
        (ConsistentHashing, {"load_factor": 0.0}),
        (ConsistentHashing, {"virtual_nodes": 0}),
    ],
)
def test_parameters_out_of_range_are_refused(make: Callable[..., object], parameters: dict[str, float]) -> None:
    ((name, value),) = parameters.items()
    with pytest.raises(ValueError, match=f"{name}: expected .*, found {value:g}"):
        make(unasked, **parameters)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.sampled_from([0.5, 1.0, 2.0, 3.0])), min_size=1, max_size=9),
    st.integers(1, 500),
    st.integers(0, 20),
)
def test_speeds_are_weighed(states: list[tuple[int, float]], tokens: int, turns: int) -> None:
    """By brute force: the least load / speed, or (load + request) / speed; the next in turn among equals."""
    engines = [Engine(load, speed=speed, index=i) for i, (load, speed) in enumerate(states)]
    request = Request(0, 0.0, tokens, 2)
    for name, added in (("weighted_least_loaded", 0), ("shortest_expected_delay", tokens + 2)):
        router = ROUTERS.select(name)(lambda size: 0)
        for turn in range(turns + 1):
            choice = router.choose(request, engines)
            delays = [(engine.load + added) / engine.speed for engine in engines]
            equals = [i for i, delay in enumerate(delays) if delay == min(delays)]
            first = turn % len(engines)
            assert choice.index == min(equals, key=lambda i: (i - first) % len(engines))


def test_what_belongs_together_has_one_key() -> None:
    """The session, else the first block of the prompt, else the request itself."""
    turn, first = (Request(5, 0.0, 64, 2, prefix_blocks=(7, 8), session=session) for session in (3, -1))
    assert [routing_key(request) for request in (turn, first, REQUEST)] == [3, 7, REQUEST.id]


def test_an_idle_slow_engine_gets_nothing_that_a_busy_fast_one_finishes_sooner() -> None:
    engines = [Engine(100, speed=10.0, index=0), Engine(0, speed=1.0, index=1)]
    request = Request(0, 0.0, 98, 2)
    assert ROUTERS.select("weighted_least_loaded")(lambda size: 0).choose(request, engines) is engines[1]
    assert ROUTERS.select("shortest_expected_delay")(lambda size: 0).choose(request, engines) is engines[0]


def test_random_choices_are_in_proportion_to_speeds() -> None:
    """The thresholds of a draw from [0, 1): 1/6, 1/6 + 2/6, and the rest."""
    engines = [Engine(0, speed=1.0, index=0), Engine(0, speed=2.0, index=1), Engine(0, speed=3.0, index=2)]
    for draw, expected in ((0.0, 0), (0.16, 0), (0.17, 1), (0.49, 1), (0.51, 2), (1 - 2**-53, 2)):
        router = ROUTERS.select("weighted_random")(partial(_part, draw))
        assert router.choose(REQUEST, engines).index == expected


def _part(share: float, size: int) -> int:
    return int(share * size)
