"""What a cohort counts is what walking its members would find."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.cohort import FAR, Cohort
from schedulers.sequence import ENDING, Sequence
from workloads.request import Request


@dataclass(frozen=True)
class Member:
    """`cached` tokens, `got` output tokens of at most `limit`."""

    cached: int
    got: int
    limit: int
    reserved: bool = False


members = st.builds(
    lambda cached, got, more, reserved: Member(cached, got, got + more, reserved),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 40),
    st.booleans(),
)
block_tokens = st.sampled_from([1, 2, 4, 7])


def join(cohort: Cohort, number: int, member: Member) -> Sequence:
    sequence = Sequence(Request(number, 0.0, member.cached, member.limit), number, False)
    sequence.computed, sequence.generated, sequence.reserved = member.cached, member.got, member.reserved
    cohort.join(sequence)
    return sequence


def cohort_of(crowd: list[Member], block_tokens: int, tick: int = 0) -> tuple[Cohort, list[Sequence]]:
    cohort = Cohort(block_tokens)
    cohort.advance(tick)
    return cohort, [join(cohort, number, member) for number, member in enumerate(crowd)]


def blocks_started(crowd: list[Member], block_tokens: int, steps: int) -> int:
    """Token number n of a sequence, counted from 0, starts a block when n is a multiple of the block's size."""
    return sum(
        (member.cached + step) % block_tokens == 0 for member in crowd if not member.reserved for step in range(steps)
    )


@given(st.lists(members, max_size=8), block_tokens, st.integers(0, 20), st.integers(0, 30))
def test_blocks_that_coming_steps_start(crowd: list[Member], block_tokens: int, tick: int, steps: int) -> None:
    cohort, _ = cohort_of(crowd, block_tokens, tick)
    assert cohort.starting() == blocks_started(crowd, block_tokens, 1)
    assert cohort.blocks_within(steps) == blocks_started(crowd, block_tokens, steps)


@given(st.lists(members, max_size=8), block_tokens, st.integers(0, 20), st.integers(0, 40), st.integers(0, 30))
def test_how_long_blocks_last(crowd: list[Member], block_tokens: int, tick: int, blocks: int, most: int) -> None:
    cohort, _ = cohort_of(crowd, block_tokens, tick)
    lasting = [steps for steps in range(most + 1) if blocks_started(crowd, block_tokens, steps) <= blocks]
    assert cohort.steps_within(blocks, most) == max(lasting)


def test_blocks_last_for_ever_where_none_is_started() -> None:
    assert cohort_of([Member(9, 1, 5, reserved=True)], 4)[0].steps_within(0, FAR) == FAR
    assert cohort_of([], 4)[0].steps_within(0, 7) == 7


def test_by_hand() -> None:
    """Blocks of 4: the members' next tokens are their 4th, 5th and 9th, so two of them start a block at once."""
    cohort, (short, middle, long) = cohort_of([Member(3, 1, 3), Member(4, 1, 9), Member(8, 2, 9)], 4)
    assert (cohort.size, cohort.kv, cohort.longest(), cohort.steps_to_limit()) == (3, 15, 8, 2)
    assert [cohort.is_starting(sequence) for sequence in (short, middle, long)] == [False, True, True]
    assert [cohort.blocks_within(steps) for steps in range(7)] == [0, 2, 3, 3, 3, 5, 6]
    assert [cohort.steps_within(blocks, 9) for blocks in range(7)] == [0, 0, 1, 4, 4, 5, 8]
    cohort.advance(2)
    assert cohort.reach_limits() == [short]
    assert (short.state, short.computed, short.generated, short.left) == (ENDING, 5, 3, 2)
    assert (cohort.kv_tokens(middle), cohort.generated(middle), cohort.generated(long)) == (6, 3, 4)
    assert (cohort.size, cohort.kv, cohort.longest(), cohort.starting(), cohort.steps_to_limit()) == (2, 16, 10, 0, 5)
    cohort.check_integrity()


@given(st.lists(st.tuples(members, st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=12), block_tokens)
def test_joining_leaving_and_limits(crowd: list[tuple[Member, int, int]], block_tokens: int) -> None:
    """Members join at one tick and leave after some more, or at their limit; every tick is counted by hand."""
    cohort = Cohort(block_tokens)
    inside: dict[Sequence, list[int]] = {}  # sequence: tokens cached, tokens got
    leaving: dict[Sequence, int] = {}
    for tick in range(30):
        for number, (member, joins, stays) in enumerate(crowd):
            if joins == tick:
                sequence = join(cohort, number, member)
                inside[sequence], leaving[sequence] = [member.cached, member.got], tick + stays
        for sequence in [sequence for sequence in inside if leaving[sequence] == tick]:
            cohort.leave(sequence)
            assert [sequence.computed, sequence.generated, sequence.left] == [*inside.pop(sequence), tick]
        assert cohort.steps_to_limit() == min((s.limit - got for s, (_, got) in inside.items()), default=FAR)
        cohort.advance(1)
        for counts in inside.values():
            counts[0] += 1
            counts[1] += 1
        cached = [cached for cached, _ in inside.values()]
        assert (cohort.size, cohort.kv, cohort.longest()) == (len(cached), sum(cached), max(cached, default=0))
        ending = cohort.reach_limits()
        assert ending == sorted((s for s, (_, got) in inside.items() if got == s.limit), key=lambda s: s.number)
        for sequence in ending:
            assert [sequence.computed, sequence.generated] == inside.pop(sequence)
        assert list(cohort.members) == list(inside)
        cohort.check_integrity()


@given(st.lists(members, min_size=1, max_size=8), block_tokens, st.data())
def test_a_run_of_steps_is_that_many_single_ones(crowd: list[Member], block_tokens: int, data: st.DataObject) -> None:
    one_by_one, _ = cohort_of(crowd, block_tokens)
    at_once, _ = cohort_of(crowd, block_tokens)
    steps = data.draw(st.integers(0, at_once.steps_to_limit()))
    for _ in range(steps):
        one_by_one.advance(1)
    at_once.advance(steps)
    for cohort in (one_by_one, at_once):
        cohort.check_integrity()
    assert (at_once.tick, at_once.kv, at_once.starting(), at_once.longest()) == (
        one_by_one.tick, one_by_one.kv, one_by_one.starting(), one_by_one.longest(),
    )  # fmt: skip


def test_integrity_check_speaks_up() -> None:
    cohort, _ = cohort_of([Member(3, 1, 5), Member(9, 1, 5)], 4)
    cohort.kv += 1
    with pytest.raises(AssertionError, match="2 decodes of 13 tokens, but 2 of 12"):
        cohort.check_integrity()
