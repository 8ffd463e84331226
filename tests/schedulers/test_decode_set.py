"""Counts of a set of decodes equal those found by walking its members."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.sequence import FINISHING, UNLIMITED_STEPS, DecodeSet, Sequence
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
block_size = st.sampled_from([1, 2, 4, 7])


def join(decodes: DecodeSet, number: int, member: Member) -> Sequence:
    sequence = Sequence(Request(number, 0.0, member.cached, member.limit), number, False)
    sequence.num_computed_tokens = member.cached
    sequence.num_output_tokens = member.got
    sequence.blocks_reserved = member.reserved
    decodes.add(sequence)
    return sequence


def decode_set_of(crowd: list[Member], block_size: int, step: int = 0) -> tuple[DecodeSet, list[Sequence]]:
    decodes = DecodeSet(block_size)
    decodes.advance(step)
    return decodes, [join(decodes, number, member) for number, member in enumerate(crowd)]


def blocks_started(crowd: list[Member], block_size: int, steps: int) -> int:
    """Token number n of a sequence, counted from 0, starts a block when n is a multiple of the block's size."""
    return sum(
        (member.cached + step) % block_size == 0 for member in crowd if not member.reserved for step in range(steps)
    )


@given(st.lists(members, max_size=8), block_size, st.integers(0, 20), st.integers(0, 30))
def test_blocks_that_coming_steps_start(crowd: list[Member], block_size: int, step: int, steps: int) -> None:
    decodes, _ = decode_set_of(crowd, block_size, step)
    assert decodes.num_new_blocks() == blocks_started(crowd, block_size, 1)
    assert decodes.num_new_blocks_within(steps) == blocks_started(crowd, block_size, steps)


@given(st.lists(members, max_size=8), block_size, st.integers(0, 20), st.integers(0, 40), st.integers(0, 30))
def test_how_long_blocks_last(crowd: list[Member], block_size: int, step: int, blocks: int, maximum: int) -> None:
    decodes, _ = decode_set_of(crowd, block_size, step)
    lasting = [steps for steps in range(maximum + 1) if blocks_started(crowd, block_size, steps) <= blocks]
    assert decodes.steps_within_blocks(blocks, maximum) == max(lasting)


def test_blocks_last_for_ever_where_none_is_started() -> None:
    assert (
        decode_set_of([Member(9, 1, 5, reserved=True)], 4)[0].steps_within_blocks(0, UNLIMITED_STEPS) == UNLIMITED_STEPS
    )
    assert decode_set_of([], 4)[0].steps_within_blocks(0, 7) == 7


def test_by_hand() -> None:
    """Blocks of 4: the members' next tokens are their 4th, 5th and 9th, so two of them start a block at once."""
    decodes, (short, middle, long) = decode_set_of([Member(3, 1, 3), Member(4, 1, 9), Member(8, 2, 9)], 4)
    assert (decodes.size, decodes.kv_tokens, decodes.longest(), decodes.steps_to_max_tokens()) == (3, 15, 8, 2)
    assert [decodes.needs_block(sequence) for sequence in (short, middle, long)] == [False, True, True]
    assert [decodes.num_new_blocks_within(steps) for steps in range(7)] == [0, 2, 3, 3, 3, 5, 6]
    assert [decodes.steps_within_blocks(blocks, 9) for blocks in range(7)] == [0, 0, 1, 4, 4, 5, 8]
    decodes.advance(2)
    assert decodes.pop_finishing() == [short]
    assert (short.state, short.num_computed_tokens, short.num_output_tokens, short.left_step) == (FINISHING, 5, 3, 2)
    assert (
        decodes.num_computed_tokens(middle),
        decodes.num_output_tokens(middle),
        decodes.num_output_tokens(long),
    ) == (6, 3, 4)
    assert (
        decodes.size,
        decodes.kv_tokens,
        decodes.longest(),
        decodes.num_new_blocks(),
        decodes.steps_to_max_tokens(),
    ) == (2, 16, 10, 0, 5)
    decodes.check_integrity()


@given(st.lists(st.tuples(members, st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=12), block_size)
def test_joining_leaving_and_limits(crowd: list[tuple[Member, int, int]], block_size: int) -> None:
    """Members join at one step and leave after some more, or at their limit; every step is counted by hand."""
    decodes = DecodeSet(block_size)
    inside: dict[Sequence, list[int]] = {}  # sequence: tokens cached, tokens got
    leaving: dict[Sequence, int] = {}
    for step in range(30):
        for number, (member, joins, stays) in enumerate(crowd):
            if joins == step:
                sequence = join(decodes, number, member)
                inside[sequence], leaving[sequence] = [member.cached, member.got], step + stays
        for sequence in [sequence for sequence in inside if leaving[sequence] == step]:
            decodes.remove(sequence)
            assert [sequence.num_computed_tokens, sequence.num_output_tokens, sequence.left_step] == [
                *inside.pop(sequence),
                step,
            ]
        assert decodes.steps_to_max_tokens() == min(
            (s.max_tokens - tokens for s, (_, tokens) in inside.items()), default=UNLIMITED_STEPS
        )
        decodes.advance(1)
        for counts in inside.values():
            counts[0] += 1
            counts[1] += 1
        cached = [cached for cached, _ in inside.values()]
        assert (decodes.size, decodes.kv_tokens, decodes.longest()) == (
            len(cached),
            sum(cached),
            max(cached, default=0),
        )
        ending = decodes.pop_finishing()
        assert ending == sorted(
            (s for s, (_, tokens) in inside.items() if tokens == s.max_tokens), key=lambda s: s.seq_id
        )
        for sequence in ending:
            assert [sequence.num_computed_tokens, sequence.num_output_tokens] == inside.pop(sequence)
        assert list(decodes.sequences) == list(inside)
        decodes.check_integrity()


@given(st.lists(members, min_size=1, max_size=8), block_size, st.data())
def test_a_run_of_steps_is_that_many_single_ones(crowd: list[Member], block_size: int, data: st.DataObject) -> None:
    one_by_one, _ = decode_set_of(crowd, block_size)
    at_once, _ = decode_set_of(crowd, block_size)
    steps = data.draw(st.integers(0, at_once.steps_to_max_tokens()))
    by_step = at_once.num_new_blocks_by_step(steps)
    assert sum(by_step) == at_once.num_new_blocks_within(steps)
    for blocks in by_step:
        assert blocks == one_by_one.num_new_blocks()
        one_by_one.advance(1)
    at_once.advance(steps)
    for decodes in (one_by_one, at_once):
        decodes.check_integrity()
    assert (at_once.step_index, at_once.kv_tokens, at_once.num_new_blocks(), at_once.longest()) == (
        one_by_one.step_index, one_by_one.kv_tokens, one_by_one.num_new_blocks(), one_by_one.longest(),
    )  # fmt: skip


def test_integrity_check_speaks_up() -> None:
    decodes, _ = decode_set_of([Member(3, 1, 5), Member(9, 1, 5)], 4)
    decodes.kv_tokens += 1
    with pytest.raises(AssertionError, match="2 decodes of 13 tokens, but 2 of 12"):
        decodes.check_integrity()
