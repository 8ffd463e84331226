"""Drawn sessions: prompts that grow by what was said, blocks that stand for the same text, and what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.arrivals import Pauses, Poisson
from workloads.errors import BadInput
from workloads.lengths import Fixed, Geometric, Uniform
from workloads.mixes import SharedPrefixes
from workloads.sessions import Branches, DrawnSessions, Round, ToolCalls


def session_workload(**fields: Any) -> DrawnSessions:
    plain = {"turns": Fixed(3), "first": Fixed(32), "growth": Fixed(15), "answers": Fixed(17), "think": Pauses(10.0)}
    return DrawnSessions(**{**plain, **fields})


def rounds(workload: DrawnSessions, count: int, seed: int = 1) -> list[list[Round]]:
    return [list(session.rounds) for session in workload.sessions(np.random.default_rng(seed), count)]


def test_a_prompt_repeats_what_was_said_and_adds_to_it() -> None:
    ((first, second, third),) = rounds(session_workload(), 3)
    assert [round_.prompts[0].tokens for round_ in (first, second, third)] == [32, 32 + 17 + 15, 64 + 17 + 15]
    assert [round_.prompts[0].resent_tokens for round_ in (first, second, third)] == [0, 49, 81]
    assert [round_.pause for round_ in (first, second, third)] == [0.0, 10.0, 10.0]
    # Whole blocks of what was said have the ids that they had: 49 // 16 = 3, and 81 // 16 = 5.
    assert second.prompts[0].prefix_blocks[:3] == first.prompts[0].prefix_blocks[:3]
    assert third.prompts[0].prefix_blocks[:5] == second.prompts[0].prefix_blocks[:5]
    assert [len(round_.prompts[0].prefix_blocks) for round_ in (first, second, third)] == [3, 5, 7]


def test_branches_begin_alike_and_the_first_of_them_goes_on() -> None:
    ((_, second, third),) = rounds(session_workload(branches=Branches(1.0, 2)), 5)
    left_branch, two = second.prompts
    assert left_branch.prefix_blocks[:3] == two.prefix_blocks[:3]
    assert not set(left_branch.prefix_blocks[3:]) & set(two.prefix_blocks[3:])
    assert third.prompts[0].prefix_blocks[:5] == third.prompts[1].prefix_blocks[:5] == left_branch.prefix_blocks[:5]


@given(
    seed=st.integers(0, 1000),
    count=st.integers(1, 60),
    block_tokens=st.sampled_from([1, 4, 16]),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    branches=st.sampled_from([2, 3]),
    max_tokens=st.sampled_from([None, 5, 30]),
    max_model_len=st.sampled_from([None, 40, 200]),
    rubric=st.booleans(),
)
def test_two_blocks_have_one_id_exactly_when_they_hold_the_same_text(
    seed: int, count: int, block_tokens: int, share: float, branches: int, max_tokens: int | None,
    max_model_len: int | None, rubric: bool,
) -> None:  # fmt: skip
    """The text is written out token by token, each new one unlike all others; a rubric is the same text in sessions."""
    workload = session_workload(
        turns=Geometric(4.0), first=Uniform(1, 30), growth=Uniform(0, 12), answers=Uniform(1, 20),
        tools=ToolCalls(share, Pauses(1.0), Uniform(0, 40)), branches=Branches(share, branches),
        prefixes=SharedPrefixes(2, 20, block_tokens) if rubric else None,
        max_tokens=max_tokens, max_model_len=max_model_len, block_tokens=block_tokens,
    )  # fmt: skip
    texts: dict[tuple[object, ...], int] = {}
    fresh = iter(range(10**9))
    requests = 0
    for session in workload.sessions(np.random.default_rng(seed), count):
        context: list[object] = []
        for turn, round in enumerate(session.rounds):
            prompts = round.prompts
            requests += len(prompts)
            texts_of_turn = []
            for prompt in prompts:
                text = context + [next(fresh) for _ in range(prompt.tokens - len(context))]
                assert prompt.resent_tokens == len(context)
                if rubric and not turn:
                    same = min(
                        len(prompt.prefix_blocks), workload.prefixes.shared_blocks, prompt.tokens // block_tokens
                    )  # type: ignore[union-attr]
                    text[: same * block_tokens] = [
                        ("rubric", prompt.prefix_blocks[0], i) for i in range(same * block_tokens)
                    ]
                text += [next(fresh) for _ in range(prompt.max_tokens)]
                assert len(prompt.prefix_blocks) == len(text) // block_tokens
                for i, id in enumerate(prompt.prefix_blocks):
                    assert texts.setdefault(tuple(text[: (i + 1) * block_tokens]), id) == id
                if max_model_len is not None:
                    assert len(text) <= max_model_len
                assert 1 <= prompt.answer_tokens <= prompt.max_tokens
                texts_of_turn.append(text[: prompt.tokens + prompt.answer_tokens])
            context = texts_of_turn[0]
    assert requests == count
    assert len(set(texts.values())) == len(texts)


def test_a_session_ends_before_it_exceeds_the_model_length() -> None:
    """Prompts of 32, 64 and 96 tokens and answers of 17: the third request takes 113 tokens."""
    assert [len(session) for session in rounds(session_workload(max_model_len=112), 4)] == [2, 2]
    assert [len(session) for session in rounds(session_workload(max_model_len=113), 3)] == [3]
    ((only,),) = rounds(session_workload(max_model_len=40), 1)
    assert only.prompts[0][:4] == (23, 0, 17, 17)


def test_what_is_drawn_has_the_means_that_are_asked_for() -> None:
    workload = session_workload(
        turns=Geometric(4.0), think=Pauses(2.0, 1.0), tools=ToolCalls(0.25, Pauses(0.5), Fixed(100)),
        branches=Branches(0.1, 3), arrivals=Poisson(5.0),
    )  # fmt: skip
    sessions = list(workload.sessions(np.random.default_rng(3), 15_000))
    sessions_rounds = [list(session.rounds) for session in sessions]
    later = [round for session in sessions_rounds for round in session[1:]]
    turns = np.array([len(session) for session in sessions_rounds])
    assert turns.mean() == pytest.approx(4.0, abs=4 * turns.std() / np.sqrt(len(turns)))
    tools = np.array([round.prompts[0].tokens - round.prompts[0].resent_tokens == 100 for round in later])
    assert tools.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / len(later)))
    assert {round.pause for round, tool in zip(later, tools, strict=True) if tool} == {0.5}
    pauses = np.array([round.pause for round, tool in zip(later, tools, strict=True) if not tool])
    assert pauses.mean() == pytest.approx(2.0, abs=4 * 2.0 / np.sqrt(len(pauses)))
    assert pauses.std() / pauses.mean() == pytest.approx(1.0, rel=0.05)
    branched = np.array([len(round.prompts) == 3 for round in later])
    assert branched.mean() == pytest.approx(0.1, abs=4 * np.sqrt(0.09 / len(later)))
    gaps = np.diff([session.arrival for session in sessions])
    assert gaps.mean() == pytest.approx(0.2, abs=4 * 0.2 / np.sqrt(len(gaps)))


def test_other_think_times_leave_the_lengths_as_they_were() -> None:
    short, long = (session_workload(answers=Geometric(9.0), think=Pauses(mean, 1.0)) for mean in (1.0, 50.0))
    assert [[r.prompts for r in session] for session in rounds(short, 50)] == [
        [r.prompts for r in session] for session in rounds(long, 50)
    ]


@pytest.mark.parametrize(
    ("fields", "random"),
    [
        ({}, ()),
        ({"turns": Geometric(2.0)}, ("sessions",)),
        ({"tools": ToolCalls(1.0, Pauses(1.0, 1.0), Uniform(1, 2))}, ("lengths", "think_times")),
        ({"tools": ToolCalls(0.5, Pauses(1.0), Fixed(1)), "arrivals": Poisson(1.0)}, ("sessions", "arrivals")),
        ({"branches": Branches(0.5, 2)}, ("sessions",)),
        ({"prefixes": SharedPrefixes(3, 32, 16)}, ("prefixes",)),
    ],
)
def test_it_says_what_differs_between_replications(fields: dict[str, Any], random: tuple[str, ...]) -> None:
    assert session_workload(**fields).random == random


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turns": Fixed(0)}, "sessions.turns: got 0, expected at least 1 in every draw"),
        ({"answers": Uniform(0, 3)}, "decode: got 0, expected at least 1 in every draw"),
        ({"first": Fixed(0)}, "prefill: got 0, expected at least 1 in every draw"),
        ({"max_tokens": 9, "max_model_len": 9}, "sessions.max_model_len: got 9, expected a whole number from 10"),
        ({"prefixes": SharedPrefixes(1, 64, 32)}, "prefixes.block_tokens: got 32, expected 16"),
        ({"prefixes": SharedPrefixes(1, 64, 16, cache_suffix=True)}, "prefixes.cache_suffix: got True, expected false"),
    ],
)
def test_what_cannot_be_used_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        session_workload(**fields)


def test_pauses_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(BadInput, match=r"cv: got 1e-05, expected 0, or at least 0\.001"):
        Pauses(1.0, 1e-5)
    with pytest.raises(BadInput, match="mean"):
        Pauses(-1.0)
    with pytest.raises(BadInput, match=r"tools\.share: got 1\.5"):
        ToolCalls(1.5, Pauses(1.0), Fixed(1))
    with pytest.raises(BadInput, match=r"branches\.count: got 1,"):
        Branches(0.5, 1)
