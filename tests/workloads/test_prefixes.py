"""Shared prefixes: who shares what with whom."""

from __future__ import annotations

import math
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import BadInput
from workloads.mixes import SharedPrefixes

Blocks = list[tuple[int, ...]]

PREFIXES = st.builds(
    SharedPrefixes,
    groups=st.integers(1, 6),
    tokens=st.integers(1, 80),
    block_tokens=st.integers(1, 20),
    zipf=st.floats(0, 3),
    cache_suffix=st.booleans(),
)
PROMPTS = st.lists(st.integers(0, 150), max_size=30)


def blocks(prefixes: SharedPrefixes, prompts: list[int], seed: int = 0, sizes: tuple[int, ...] = ()) -> Blocks:
    """The prefix blocks of all prompts, asked for in portions of the given sizes, and the rest at once."""
    stream = prefixes.stream(np.random.default_rng(seed))
    lengths = np.array(prompts, dtype=np.int64)
    ends = [0, *np.minimum(np.cumsum(sizes, dtype=int), len(prompts)).tolist(), len(prompts)]
    return list(chain.from_iterable(stream(lengths[a:b]) for a, b in pairwise(ends)))


def test_by_hand() -> None:
    """A rubric of 40 tokens has two full blocks of 16; the third holds 8 tokens of it and is nobody else's."""
    shared_only = SharedPrefixes(groups=1, tokens=40, block_tokens=16)
    assert shared_only.shared_blocks == 2
    prompts = [100, 40, 33, 31, 16, 15, 0]
    assert blocks(shared_only, prompts) == [(0, 1), (0, 1), (0, 1), (0,), (0,), (), ()]
    filling = SharedPrefixes(groups=1, tokens=40, block_tokens=16, cache_suffix=True)
    assert blocks(filling, prompts) == [(0, 1, 2, 3, 4, 5), (0, 1), (0, 1), (0,), (0,), (), ()]
    assert blocks(filling, [50, 50, 31, 64]) == [(0, 1, 2), (0, 1, 3), (0,), (0, 1, 4, 5)]


def test_a_rubric_shorter_than_a_block_shares_none() -> None:
    assert blocks(SharedPrefixes(3, tokens=15, block_tokens=16), [40, 400]) == [(), ()]
    assert blocks(SharedPrefixes(3, 15, 16, cache_suffix=True), [40, 400, 16])[::2] == [(0, 1), (27,)]


@given(prefixes=PREFIXES, prompts=PROMPTS, seed=st.integers(0, 2**32))
def test_two_prompts_share_their_rubrics_full_blocks_and_no_more(
    prefixes: SharedPrefixes, prompts: list[int], seed: int
) -> None:
    result = blocks(prefixes, prompts, seed)
    # The rubrics are what the same generator draws, so who should share with whom is known apart from the ids.
    groups = prefixes.sample(np.random.default_rng(seed), len(prompts)).tolist()
    size = prefixes.block_tokens
    for ids, prompt in zip(result, prompts, strict=True):
        assert len(ids) == min(prompt, prompt if prefixes.cache_suffix else prefixes.tokens) // size
        assert len(set(ids)) == len(ids)
    for a in range(len(prompts)):
        for b in range(a):
            shared = min(prompts[a], prompts[b], prefixes.tokens) // size if groups[a] == groups[b] else 0
            assert result[a][:shared] == result[b][:shared]
            assert set(result[a][shared:]).isdisjoint(result[b])


@given(
    prefixes=PREFIXES,
    prompts=PROMPTS,
    seed=st.integers(0, 99),
    sizes=st.lists(st.integers(0, 9), max_size=5).map(tuple),
)
def test_blocks_do_not_depend_on_how_many_are_asked_for(
    prefixes: SharedPrefixes, prompts: list[int], seed: int, sizes: tuple[int, ...]
) -> None:
    assert blocks(prefixes, prompts, seed, sizes) == blocks(prefixes, prompts, seed)


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 2.5])
def test_rubrics_are_as_popular_as_zipf_says(skew: float, p_value) -> None:
    prefixes = SharedPrefixes(100, tokens=32, block_tokens=16, zipf=skew)
    exact = np.array([rank**-skew for rank in range(1, 101)])
    exact /= exact.sum()
    assert prefixes.probabilities.tolist() == pytest.approx(exact.tolist())
    result = blocks(prefixes, [100] * 100_000)
    groups = np.array([ids[0] // 2 for ids in result])
    assert p_value(groups, exact) > 1e-3
    flatter = np.array([rank ** -(skew + 0.05) for rank in range(1, 101)])
    assert p_value(groups, flatter / flatter.sum()) < 1e-6


def test_blocks_are_made_only_when_read() -> None:
    """A rubric of a billion blocks that nobody asks for costs nothing."""
    huge = SharedPrefixes(groups=3, tokens=10**9, block_tokens=1)
    assert huge.stream(np.random.default_rng(0))(np.array([10**9])) is not None


def test_popular_rubrics_are_held_once() -> None:
    first, second = blocks(SharedPrefixes(1, 320, 16), [400, 500])
    assert first is second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 0}, "^groups: got 0, expected a whole number from 1 to 10000000"),
        ({"groups": 10**7 + 1}, "^groups: got 10000001"),
        ({"groups": 2.0}, "^groups: got 2.0"),
        ({"tokens": 0}, "^tokens: got 0"),
        ({"block_tokens": 0}, "^block_tokens: got 0"),
        ({"zipf": -1}, "^zipf: got -1, expected a number from 0"),
        ({"zipf": math.nan}, "^zipf: got nan"),
        ({"zipf": "1"}, "^zipf: got '1'"),
    ],
)
def test_bad_prefixes_are_refused(change: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        SharedPrefixes(**{"groups": 4, "tokens": 100, "block_tokens": 16} | change)
