"""Sessions of traces: grouped by their ids, recovered from blocks, and with the prompts that the trace has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.arrivals import Pauses, Poisson
from workloads.errors import BadInput
from workloads.lengths import Geometric, Uniform
from workloads.mixes import ModelMix, SharedPrefixes
from workloads.recorded_sessions import RecordedSessions, sessions_by_prefix
from workloads.sessions import Branches, DrawnSessions, Prompt, Session
from workloads.trace import Trace


def trace(
    *rows: tuple[float, int, int],
    sessions: list[int] | None = None,
    blocks: tuple[tuple[int, ...], ...] | None = None,
    size: int = 16,
) -> Trace:
    """Rows of arrival, prompt tokens and answer tokens."""
    arrivals, prompts, answers = (np.array(column) for column in zip(*rows, strict=True))
    numbers = None if sessions is None else np.array(sessions)
    return Trace("t", arrivals.astype(float), prompts, answers, blocks, size if blocks else None, numbers)


def drawn_sessions(workload: RecordedSessions, count: int | None = None) -> list[tuple[Session, list[Any]]]:
    sessions = workload.sessions(np.random.default_rng(1), workload.recorded if count is None else count)
    return [(session, list(session.rounds)) for session in sessions]


CHATS = trace((0, 32, 17), (1, 40, 9), (5, 64, 17), (9, 20, 5), (12, 96, 3), sessions=[0, 1, 0, 0, -1])


def test_a_prompt_that_is_long_enough_repeats_what_was_said() -> None:
    """The second prompt of the first session, 64, holds the 49 tokens before it; the third, 20, is a new context."""
    (first, rounds), (second, _), (third, last_rounds) = drawn_sessions(RecordedSessions(CHATS, "session_ids"))
    prompts = [round.prompts[0] for round in rounds]
    assert [(prompt.tokens, prompt.resent_tokens, prompt.answer_tokens) for prompt in prompts] == [
        (32, 0, 17), (64, 49, 17), (20, 0, 5)
    ]  # fmt: skip
    assert prompts[1].prefix_blocks[:3] == prompts[0].prefix_blocks[:3]
    assert not set(prompts[2].prefix_blocks) & set(prompts[1].prefix_blocks)
    assert [round.not_before for round in rounds] == [0, 5, 9]
    assert (first.arrival, second.arrival, third.arrival) == (0, 1, 12)
    assert last_rounds[0].prompts[0].tokens == 96
    every = [
        id
        for _, rounds in drawn_sessions(RecordedSessions(CHATS, "session_ids"))
        for id in rounds[0].prompts[0].prefix_blocks
    ]
    assert len(set(every)) == len(every), "sessions share no block"


def test_a_prompt_of_exactly_what_was_said_repeats_it() -> None:
    again = trace((0, 32, 17), (1, 49, 5), sessions=[0, 0])
    ((_, (_, second)),) = drawn_sessions(RecordedSessions(again, "session_ids"))
    assert second.prompts[0].resent_tokens == 49


def test_the_next_prompt_names_the_blocks_of_an_answer() -> None:
    """33 + 40 tokens are four whole blocks; the second prompt has the same first two, and 73 tokens or more."""
    blocks = ((1, 2, 99), (1, 2, 3, 4, 5, 6), (1, 7))
    chats = trace((0, 33, 40), (1, 96, 2), (2, 34, 1), sessions=[0, 0, 0], blocks=blocks)
    ((_, rounds),) = drawn_sessions(RecordedSessions(chats, "session_ids"))
    assert [round.prompts[0] for round in rounds] == [
        Prompt(33, 0, 40, 40, (1, 2, 3, 4)),
        Prompt(96, 73, 2, 2, (1, 2, 3, 4, 5, 6)),
        Prompt(34, 16, 1, 1, (1, 7)),  # another context, whose first block is the same
    ]


def test_a_faster_replay_and_a_limit() -> None:
    ((session, rounds), *_) = drawn_sessions(RecordedSessions(CHATS, "session_ids", speed=2.0, max_tokens=10))
    assert [round.not_before for round in rounds] == [0, 2.5, 4.5]
    assert [round.prompts[0][2:4] for round in rounds] == [(10, 10), (10, 10), (5, 10)]
    assert session.model == "default"


def test_sessions_with_think_times_begin_by_an_arrival_process() -> None:
    workload = RecordedSessions(
        CHATS, "session_ids", think=Pauses(3.0), arrivals=Poisson(1.0), models=ModelMix(["a"], [1.0])
    )
    assert workload.random == ("arrivals",)
    (first, rounds), (second, _), _ = drawn_sessions(workload)
    assert [(round.pause, round.not_before) for round in rounds] == [(3.0, 0.0)] * 3
    assert 0 < first.arrival < second.arrival
    assert first.model == "a"


def test_the_first_rows_make_the_first_sessions() -> None:
    assert [len(rounds) for _, rounds in drawn_sessions(RecordedSessions(CHATS, "session_ids"), 3)] == [2, 1]
    with pytest.raises(BadInput, match="count: got 6, expected at most the 5 recorded requests"):
        drawn_sessions(RecordedSessions(CHATS, "session_ids"), 6)


# -- recovered from blocks ---------------------------------------------------------------------------------------------


def test_a_row_continues_the_latest_whose_blocks_begin_its_own() -> None:
    system = (0, 1)
    chats = trace(
        (0, 50, 10),  # 0: a chat after a system prompt of two blocks
        (1, 33, 10),  # 1: the system prompt and less than a block: cannot be told from others
        (2, 64, 9),  # 2: continues 0: 60 tokens were said, and its three blocks are the same
        (3, 49, 9),  # 3: the system prompt and another text
        (4, 58, 9),  # 4: begins like 0, but is too short for its answer
        (5, 90, 9),  # 5: continues 2
        (6, 80, 9),  # 6: branches off 0
        blocks=(
            (*system, 2, 90), (*system, 91), (*system, 2, 3), (*system, 5, 92), (*system, 2, 93),
            (*system, 2, 3, 4, 94), (*system, 2, 6, 7),
        ),
    )  # fmt: skip
    assert sessions_by_prefix(chats).tolist() == [0, 1, 0, 2, 3, 0, 0]


@given(seed=st.integers(0, 1000), rubric=st.booleans(), share=st.sampled_from([0.0, 0.5]))
def test_what_was_drawn_is_recovered(seed: int, rubric: bool, share: float) -> None:
    """Written as a trace without session ids, sessions come back, as each of their prompts has a block of its own."""
    workload = DrawnSessions(
        turns=Geometric(3.0), first=Uniform(50, 90), growth=Uniform(16, 40), answers=Uniform(1, 30),
        branches=Branches(share, 2), prefixes=SharedPrefixes(2, 32, 16) if rubric else None,
    )  # fmt: skip
    prompts: list[tuple[float, int, Prompt]] = []
    for session in workload.sessions(np.random.default_rng(seed), 40):
        now = float(session.id)
        for round in session.rounds:
            prompts += [(now, session.id, prompt) for prompt in round.prompts]
            now += 1.5
    prompts.sort(key=lambda row: row[0])
    rows = [(now, prompt.tokens, prompt.answer_tokens) for now, _, prompt in prompts]
    # The last id of a row stands for a block that the prompt only begins, as in Mooncake's traces.
    partial = iter(range(10**9, 2 * 10**9))
    blocks = tuple(
        (*prompt.prefix_blocks[: prompt.tokens // 16], *([next(partial)] if prompt.tokens % 16 else []))
        for _, _, prompt in prompts
    )
    numbers = sessions_by_prefix(trace(*rows, blocks=blocks)).tolist()
    names: dict[int, int] = {}
    assert numbers == [names.setdefault(session, len(names)) for _, session, _ in prompts]


@pytest.mark.parametrize(
    ("trace", "source", "fields", "message"),
    [
        (trace((0, 5, 5)), "session_ids", {}, "sessions.source: got 'session_ids', expected a trace with session ids"),
        (trace((0, 5, 5)), "prefix_ids", {}, "sessions.source: got 'prefix_ids', expected a trace with prefix ids"),
        (CHATS, "session_ids", {"max_tokens": 0}, "max_tokens: got 0"),
        (CHATS, "session_ids", {"speed": 0.0}, "speed: got 0.0"),
        (
            Trace("t", None, np.array([5]), np.array([5]), sessions=np.array([0])), "session_ids", {},
            "trace: got 't', expected a trace with arrival times",
        ),
    ],
)  # fmt: skip
def test_what_a_trace_lacks_is_refused(trace: Trace, source: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        RecordedSessions(trace, source, **fields)


def test_it_says_what_differs_between_replications() -> None:
    assert RecordedSessions(CHATS, "session_ids").random == ()
    assert RecordedSessions(CHATS, "session_ids", think=Pauses(1.0, 1.0)).random == ("think_times",)
