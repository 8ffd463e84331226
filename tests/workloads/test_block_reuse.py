"""Bounds of prefix caches, against exhaustive search and against caches that are played block by block."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from workloads.trace import BlockStream

Turns = list[tuple[tuple[int, ...], int]]

turns = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=3).map(tuple), st.integers(0, 3)), min_size=1, max_size=6
).map(lambda rows: [(ids, min(lookups, len(ids))) for ids, lookups in rows])


def stream(turns: Turns) -> BlockStream:
    bounds = BlockStream()
    for ids, lookups in turns:
        bounds.add(ids, lookups)
    return bounds


def paths(ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [ids[: i + 1] for i in range(len(ids))]


def supplied(cache: frozenset[tuple[int, ...]], ids: tuple[int, ...], lookups: int) -> int:
    """The leading blocks that a cache has: one after a gap is of no use."""
    hits = 0
    for path in paths(ids)[:lookups]:
        if path not in cache:
            break
        hits += 1
    return hits


def best_by_search(turns: Turns, capacity: int) -> int:
    """The most hits over all that a cache may keep after each turn."""
    states = {frozenset[tuple[int, ...]](): 0}
    for ids, lookups in turns:
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for cache, hits in states.items():
            now = hits + supplied(cache, ids, lookups)
            at_hand = sorted(cache | set(paths(ids)))
            for choice in combinations(at_hand, min(capacity, len(at_hand))):
                following[frozenset(choice)] = max(now, following.get(frozenset(choice), 0))
        states = following
    return max(states.values())


@given(turns, st.integers(0, 4))
def test_no_choice_of_what_to_keep_supplies_more(turns: Turns, capacity: int) -> None:
    assert stream(turns).belady_hits(capacity) == best_by_search(turns, capacity)


@given(turns)
def test_an_infinite_cache_keeps_everything(turns: Turns) -> None:
    cached: set[tuple[int, ...]] = set()
    hits = 0
    for ids, lookups in turns:
        hits += supplied(frozenset(cached), ids, lookups)
        cached.update(paths(ids))
    bounds = stream(turns)
    assert bounds.infinite_hits() == hits == bounds.belady_hits(1000)
    assert bounds.lookups == sum(lookups for _, lookups in turns)


long_turns = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=6).map(tuple), st.integers(0, 6)), min_size=1, max_size=40
).map(lambda pairs: [(ids, min(lookups, len(ids))) for ids, lookups in pairs])


@given(long_turns, st.integers(6, 40))
def test_stack_distances_are_a_cache_that_is_played(turns: Turns, capacity: int) -> None:
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for ids, lookups in turns:
        hits += supplied(frozenset(cache), ids, lookups)
        for path in reversed(paths(ids)):
            cache[path] = None
            cache.move_to_end(path)
        while len(cache) > capacity:
            cache.popitem(last=False)
    assert stream(turns).lru_hits([capacity]).tolist() == [hits]


@given(long_turns)
def test_bounds_are_in_order(turns: Turns) -> None:
    bounds = stream(turns)
    sizes = [6, 8, 12, 40]
    lru, best = bounds.lru_hits(sizes).tolist(), [bounds.belady_hits(size) for size in sizes]
    assert lru == sorted(lru)
    assert best == sorted(best)
    assert all(low <= high for low, high in zip(lru, best, strict=True))
    assert best[-1] <= bounds.infinite_hits()
