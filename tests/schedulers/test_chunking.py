"""Chunk policies: the static budget, and the largest chunk that keeps the latency goal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.step_policies import PredictedSloChunks, SloChunks, StaticChunks
from workloads.request import Request


def test_a_static_budget_counts_decodes() -> None:
    assert [StaticChunks(512).max_prefill_tokens(decodes) for decodes in (0, 1, 511, 512, 600)] == [512, 511, 1, 0, 0]


def test_a_step_is_rounded_down_to_but_not_below_the_least() -> None:
    """Unrounded they are 104, 32 and 8, as by hand below."""
    policy = SloChunks(
        [1, 16, 64, 128], [3.5e-3, 4e-3, 7e-3, 15e-3], 12e-3, min_tokens=8, max_tokens=120, granularity=24
    )
    assert [policy.max_prefill_tokens(decodes) for decodes in (0, 64, 104)] == [96, 24, 8]


def test_slo_chunks_by_hand() -> None:
    """T is 4 ms to 16 tokens, then 1 ms for each 16 to 64 tokens, then 1 ms for each 8."""
    policy = SloChunks([1, 16, 64, 128], [3.5e-3, 4e-3, 7e-3, 15e-3], 12e-3, min_tokens=8, max_tokens=120)
    assert policy.seconds(0) == 0
    assert policy.seconds(40) == pytest.approx(5.5e-3)
    assert policy.seconds(144) == pytest.approx(17e-3)  # the last slope goes on
    # No decodes: T(c) <= 12 ms, 5 ms beyond T(64), which are 40 tokens.
    assert policy.max_prefill_tokens(0) == 104
    # 64 decodes take 7 ms: T(c) <= 5 ms, 1 ms beyond T(16). One more takes 0.125 ms, which are 2 tokens.
    assert (policy.max_prefill_tokens(64), policy.max_prefill_tokens(65)) == (32, 30)
    # 104 decodes take all of it, and so do more.
    assert (policy.max_prefill_tokens(104), policy.max_prefill_tokens(1000)) == (8, 8)
    # Without a goal that binds, c_max.
    assert SloChunks([1, 16, 64, 128], [3.5e-3, 4e-3, 7e-3, 15e-3], 1.0, 8, 120).max_prefill_tokens(5) == 120


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Kernel tables: from 1 token on, in whole microseconds."""
    rows = draw(st.integers(2, 7))
    gaps = st.lists(st.integers(1, 90), min_size=rows, max_size=rows)
    tokens, micros = np.cumsum(draw(gaps)), np.cumsum(draw(gaps))
    return [int(n - tokens[0] + 1) for n in tokens], [float(t) for t in micros]


@given(tables(), st.integers(0, 400), st.integers(1, 60), st.integers(0, 200))
def test_slo_chunks_against_all_chunks(
    table: tuple[list[int], list[float]], goal: int, smallest: int, more: int
) -> None:
    tokens, micros = table
    policy = SloChunks(tokens, micros, goal, smallest, smallest + more)
    slope = (micros[-1] - micros[-2]) / (tokens[-1] - tokens[-2])

    def seconds(n: int) -> float:
        if n == 0:
            return 0.0
        return float(np.interp(n, tokens, micros)) + max(n - tokens[-1], 0) * slope

    chunks = range(smallest, smallest + more + 1)
    previous = smallest + more
    for decodes in range(0, 300, 7):
        assert policy.seconds(decodes) == pytest.approx(seconds(decodes))
        remaining = goal - seconds(decodes)
        surely = max((c for c in chunks if seconds(c) <= remaining - 1e-9), default=smallest)
        perhaps = max((c for c in chunks if seconds(c) <= remaining + 1e-9), default=smallest)
        chunk = policy.max_prefill_tokens(decodes)
        assert surely <= chunk <= perhaps
        budget = goal - policy.seconds(decodes)  # to the token, by T as the policy computes it
        assert chunk == smallest or policy.seconds(chunk) <= budget
        assert chunk == smallest + more or policy.seconds(chunk + 1) > budget
        assert smallest <= chunk <= previous, "more decodes leave no more for prompts"
        previous = chunk


@pytest.mark.parametrize(
    ("tokens", "seconds", "limits", "fault"),
    [
        ([1], [1.0], (1, 2), "at least 2 rows"),
        ([1, 2], [1.0, 2.0, 3.0], (1, 2), "found 2 and 3"),
        ([1, 1], [1.0, 2.0], (1, 2), "a table that increases"),
        ([1, 2], [2.0, 1.0], (1, 2), "a table that increases"),
        ([1, 2], [1.0, 2.0], (0, 2), "found 0 and 2"),
        ([1, 2], [1.0, 2.0], (3, 2), "found 3 and 2"),
    ],
)
def test_tables_that_cannot_be_used(
    tokens: list[int], seconds: list[float], limits: tuple[int, int], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        SloChunks(tokens, seconds, 1.0, *limits)


@given(
    st.floats(0.0, 20.0), st.integers(1, 40), st.integers(0, 90), st.integers(1, 24), st.integers(0, 60),
    st.integers(0, 900),
)  # fmt: skip
def test_predicted_chunks_against_all_chunks(
    goal: float, smallest: int, more: int, granularity: int, decodes: int, context: int
) -> None:
    """The model has one pass, and time for cached tokens: no table over tokens can stand for it."""

    def seconds(num_decodes: int, decode_kv: int, longest: int, context: int, tokens: int) -> float:
        return 3.0 + 0.05 * (num_decodes + tokens) + 1e-3 * decode_kv + 1e-4 * longest + 2e-4 * tokens * context

    policy = PredictedSloChunks(seconds, goal, smallest, smallest + more, granularity)
    cached = 20 * decodes, 30, context
    chunks = [c for c in range(smallest, smallest + more + 1) if seconds(decodes, *cached, c) <= goal]
    largest = max(chunks, default=smallest)
    expected = max(largest - largest % granularity, smallest)
    assert policy.max_prefill_tokens(decodes, *cached) == expected


def test_predicted_chunks_refuse_limits_in_the_wrong_order() -> None:
    with pytest.raises(ValueError, match="1 <= smallest <= largest"):
        PredictedSloChunks(lambda *step: 1.0, 1.0, 4, 2)


def test_a_policy_learns_what_the_step_attends_to() -> None:
    """The numbers that the policy is asked with are those of the batch that comes of it."""
    calls: list[tuple[int, ...]] = []

    class Watching(StaticChunks):
        def max_prefill_tokens(self, num_decodes: int, *cached: int) -> int:
            calls.append((num_decodes, *cached))
            return 3

    core = EngineCore(EngineConfig(num_gpu_blocks=64, block_size=4), Watching(8))
    for i, prompt in enumerate((2, 7, 1)):
        core.submit(Request(i, 0.0, prompt, 9), 0.0)
    for _ in range(4):
        batch = core.begin_step(0.0)
        first = batch.chunks[0].context
        assert calls[-1] == (batch.n_decodes, batch.decode_kv, batch.longest_decode, first)
        core.end_step(batch, [], 0.0)
    assert max(call[3] for call in calls) == 4, "the second prompt came in pieces"
