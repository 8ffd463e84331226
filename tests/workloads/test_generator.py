"""Whole workloads: what arrives is what was described, however it is drawn."""

from __future__ import annotations

import math
import tracemalloc
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.arrivals import ClosedLoop, Deterministic, Gamma, Poisson, Replay
from workloads.errors import BadInput
from workloads.generator import Workload
from workloads.lengths import Empirical, Fixed, Geometric, LogNormal, Uniform
from workloads.mixes import ModelMix, SharedPrefixes, TaskMix, TaskShare
from workloads.pairs import Independent, JointEmpirical
from workloads.request import Request
from workloads.traces import Trace

CHATS = Independent(LogNormal(300, 1.0), Geometric(40))
SMALL = Independent(Uniform(0, 100), Uniform(1, 9))
MODELS = ModelMix.zipf(["math", "code", "tools"], 1.0)
RUBRICS = SharedPrefixes(groups=3, tokens=64, block_tokens=16, zipf=1.0, cache_suffix=True)
DAY = TaskMix(
    [
        TaskShare("generate", 2, CHATS),
        TaskShare("classify", 1, Uniform(50, 90), priority=-1),
        TaskShare("prompt_logprobs", 1, LogNormal(200, 0.5), priority=4),
    ]
)
TRACE = Trace(
    "recorded",
    np.array([0.0, 0.0, 1.5, 4.0]),
    np.array([33, 50, 0, 64]),
    np.array([5, 1, 9, 700]),
    ((0, 1), (0, 2, 3), (), (7, 8, 9, 10)),
    16,
)
TIMELESS = replace(TRACE, arrivals=None, prefix_blocks=None, prefix_block_tokens=None)


def drawn_requests(workload: Workload, count: int, seed: int = 1, block: int = 4096) -> list[tuple[Request, int]]:
    return list(workload.requests(np.random.default_rng(seed), count, block=block))


def requests(workload: Workload, count: int, seed: int = 1) -> list[Request]:
    return [request for request, _ in drawn_requests(workload, count, seed)]


PAIRS = st.sampled_from(
    [
        CHATS,
        SMALL,
        Independent(Fixed(5), Fixed(1)),
        Independent(Empirical([0, 3, 900]), Empirical([1, 60])),
        JointEmpirical([10, 2000, 30], [300, 2, 7]),
    ]
)
PROCESSES = st.one_of(
    st.just(ClosedLoop()),
    st.builds(Poisson, st.floats(1e-3, 1e3)),
    st.builds(Gamma, st.floats(1e-3, 1e3), st.floats(0.1, 5)),
    st.builds(Deterministic, st.floats(1e-3, 1e3)),
    st.builds(Replay, st.lists(st.floats(0, 1e9), min_size=60, max_size=60).map(sorted)),
)
WORKLOADS = st.builds(
    Workload,
    content=st.one_of(PAIRS, st.just(DAY)),
    arrivals=PROCESSES,
    models=st.sampled_from([None, MODELS]),
    prefixes=st.sampled_from([None, RUBRICS, SharedPrefixes(9, 100, 16)]),
    max_tokens=st.sampled_from([None, 1, 20, 10**6]),
)


@given(workload=WORKLOADS, count=st.integers(0, 60), seed=st.integers(0, 2**32), block=st.integers(1, 70))
def test_the_block_size_changes_nothing(workload: Workload, count: int, seed: int, block: int) -> None:
    at_once = drawn_requests(workload, count, seed)
    assert drawn_requests(workload, count, seed, block) == at_once
    assert drawn_requests(workload, count // 2, seed) == at_once[: count // 2], "nor does how many are asked for"


@given(workload=WORKLOADS, count=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_every_request_is_whole(workload: Workload, count: int, seed: int) -> None:
    rows = drawn_requests(workload, count, seed)
    assert [request.id for request, _ in rows] == list(range(count))
    assert [request.arrival for request, _ in rows] == sorted(request.arrival for request, _ in rows)
    for request, answer in rows:
        kinds = {type(request.id), type(request.prompt_tokens), type(request.max_tokens), type(answer)}
        assert (kinds, type(request.arrival)) == ({int}, float)
        if request.task == "generate":
            assert 1 <= answer <= request.max_tokens
        else:
            assert answer == request.max_tokens == 0
            assert request.one_shot
        limit = answer if workload.max_tokens is None else workload.max_tokens
        assert request.max_tokens == (limit if answer else 0)


def test_by_hand() -> None:
    workload = Workload(Independent(Fixed(40), Fixed(3)), Deterministic(4.0), prefixes=SharedPrefixes(1, 16, 16))
    assert drawn_requests(workload, 2) == [
        (Request(0, 0.25, 40, 3, "default", (0,), "generate", 0), 3),
        (Request(1, 0.5, 40, 3, "default", (0,), "generate", 0), 3),
    ]


def test_without_arrivals_the_loop_is_closed() -> None:
    assert {request.arrival for request in requests(Workload(CHATS), 100)} == {0.0}
    assert requests(Workload(CHATS), 100) == requests(Workload(CHATS, ClosedLoop()), 100)


def test_lengths_are_those_described(assert_mean_and_cv) -> None:
    rows = drawn_requests(Workload(CHATS), 100_000)
    assert_mean_and_cv(np.array([request.prompt_tokens for request, _ in rows]), CHATS.prefill.mean, CHATS.prefill.cv)
    assert_mean_and_cv(np.array([answer for _, answer in rows]), 40.0, CHATS.decode.cv)


def test_models_and_tasks_come_in_their_proportions(p_value) -> None:
    rows = drawn_requests(Workload(DAY, models=MODELS), 60_000)
    models = np.array([MODELS.models.index(request.model) for request, _ in rows])
    tasks = np.array([["generate", "classify", "prompt_logprobs"].index(request.task) for request, _ in rows])
    assert p_value(models, MODELS.probabilities) > 1e-3
    assert p_value(tasks, DAY.probabilities) > 1e-3
    joint_shares = np.outer(DAY.probabilities, MODELS.probabilities).ravel()
    assert p_value(tasks * 3 + models, joint_shares) > 1e-3, "a task says nothing of the model"


def test_tasks_bring_their_lengths_and_priorities() -> None:
    for request, answer in drawn_requests(Workload(DAY), 2000):
        if request.task == "classify":
            assert 50 <= request.prompt_tokens <= 90
        assert request.priority == {"generate": 0, "classify": -1, "prompt_logprobs": 4}[request.task]
        assert (answer > 0) == (request.task == "generate")


def test_rubrics_reach_the_requests_of_every_block(p_value) -> None:
    workload = Workload(Independent(Fixed(100), Fixed(1)), prefixes=SharedPrefixes(3, 64, 16, zipf=1.0))
    rows = drawn_requests(workload, 30_000, block=100)
    groups = np.array([request.prefix_blocks[0] // 4 for request, _ in rows])
    assert {request.prefix_blocks for request, _ in rows} == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)}
    assert p_value(groups, np.array([6, 3, 2]) / 11) > 1e-3


def test_no_suffix_block_comes_twice() -> None:
    workload = Workload(Independent(Uniform(0, 200), Fixed(1)), prefixes=RUBRICS)
    ids = [i for request, _ in drawn_requests(workload, 3000, block=50) for i in request.prefix_blocks[4:]]
    assert len(set(ids)) == len(ids) > 5000


def test_a_limit_cuts_the_answer_and_is_the_same_for_all() -> None:
    free, limited = drawn_requests(Workload(CHATS), 2000), drawn_requests(Workload(CHATS, max_tokens=30), 2000)
    assert {request.max_tokens for request, _ in limited} == {30}
    assert [answer for _, answer in limited] == [min(answer, 30) for _, answer in free]
    assert sum(answer > 30 for _, answer in free) > 500


CHANGED = {
    "arrivals": (Workload(DAY, Poisson(9.0)), ("arrival",)),
    "models": (Workload(DAY, Poisson(1.0), MODELS), ("model",)),
    "prefixes": (Workload(DAY, Poisson(1.0), prefixes=RUBRICS), ("prefix_blocks",)),
    "max_tokens": (Workload(DAY, Poisson(1.0), max_tokens=7), ("max_tokens",)),
    "content": (Workload(SMALL, Poisson(1.0)), ("prompt_tokens", "max_tokens", "task", "priority")),
}


@pytest.mark.parametrize(("changed", "fields"), CHANGED.values(), ids=CHANGED.keys())
def test_one_change_leaves_all_other_quantities_as_they_were(changed: Workload, fields: tuple[str, ...]) -> None:
    before = requests(Workload(DAY, Poisson(1.0)), 500)
    after = requests(changed, 500)
    assert before != after
    level = dict.fromkeys(fields, 0) | ({"task": "generate"} if "task" in fields else {})
    assert [replace(request, **level) for request in before] == [replace(request, **level) for request in after]


def test_quantities_do_not_move_together() -> None:
    """The classic slip: the same numbers drawn for two of them."""
    rows = drawn_requests(Workload(Independent(Uniform(1, 10_000), Uniform(1, 10_000)), Poisson(1.0), MODELS), 20_000)
    columns = [
        [request.prompt_tokens for request, _ in rows],
        [answer for _, answer in rows],
        np.diff([request.arrival for request, _ in rows], prepend=0.0),
        [MODELS.models.index(request.model) for request, _ in rows],
    ]
    correlations = np.corrcoef(columns) - np.eye(4)
    assert np.abs(correlations).max() < 5 / math.sqrt(20_000)


def test_seeds_repeat_and_differ() -> None:
    workload = Workload(CHATS, Poisson(1.0))
    assert (
        drawn_requests(workload, 20, seed=1)
        == drawn_requests(workload, 20, seed=1)
        != drawn_requests(workload, 20, seed=2)
    )
    rng = np.random.default_rng(1)
    first, second = list(workload.requests(rng, 20)), list(workload.requests(rng, 20))
    assert first == drawn_requests(workload, 20, seed=1)
    assert first != second


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    def peak(count: int) -> int:
        workload = Workload(Independent(Fixed(300), Geometric(40)), Poisson(1.0), MODELS, RUBRICS)
        tracemalloc.start()
        try:
            deque(workload.requests(np.random.default_rng(0), count, block=256), maxlen=0)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(8000)  # Python keeps freed tuples for others of their lengths
    assert peak(8000) < 1.2 * peak(1000)


def test_a_trace_is_replayed_row_by_row() -> None:
    workload = Workload.replay(TRACE)
    assert (workload.recorded, workload.prefix_block_tokens) == (4, 16)
    expected = [
        (Request(0, 0.0, 33, 5, prefix_blocks=(0, 1)), 5),
        (Request(1, 0.0, 50, 1, prefix_blocks=(0, 2, 3)), 1),
        (Request(2, 1.5, 0, 9), 9),
        (Request(3, 4.0, 64, 700, prefix_blocks=(7, 8, 9, 10)), 700),
    ]
    assert drawn_requests(workload, 4) == drawn_requests(workload, 4, seed=2, block=3) == expected
    assert drawn_requests(workload, 2) == expected[:2]


def test_a_trace_may_be_played_faster_for_several_models_and_with_a_limit() -> None:
    rows = drawn_requests(Workload.replay(TRACE, speed=2.0, models=MODELS, max_tokens=8), 4)
    assert [request.arrival for request, _ in rows] == [0.0, 0.0, 0.75, 2.0]
    assert [answer for _, answer in rows] == [5, 1, 8, 8]
    assert {request.max_tokens for request, _ in rows} == {8}
    assert {request.model for request, _ in rows} <= set(MODELS.models)


def test_the_rows_of_a_trace_may_come_at_other_times() -> None:
    rows = requests(Workload(TRACE, Deterministic(1.0)), 4)
    assert [(request.arrival, request.prompt_tokens) for request in rows] == [(1.0, 33), (2.0, 50), (3.0, 0), (4.0, 64)]
    assert {request.arrival for request in requests(Workload(TIMELESS), 4)} == {0.0}


def test_a_trace_without_prefixes_may_be_given_some() -> None:
    untold = replace(TRACE, prefix_blocks=None, prefix_block_tokens=None)
    assert requests(Workload.replay(untold, prefixes=SharedPrefixes(1, 32, 16)), 1)[0].prefix_blocks == (0, 1)
    workload = Workload(TIMELESS, prefixes=SharedPrefixes(1, 32, 16))
    assert [request.prefix_blocks for request in requests(workload, 4)] == [(0, 1), (0, 1), (), (0, 1)]
    assert workload.prefix_block_tokens == 16
    assert Workload(TIMELESS).prefix_block_tokens is None


def test_recorded_is_the_shortest_record() -> None:
    assert Workload(CHATS, Poisson(1.0)).recorded is None
    assert Workload(CHATS, Replay([1, 2])).recorded == 2
    assert Workload(TRACE, Poisson(1.0)).recorded == 4
    assert Workload(TRACE, Replay([1, 2])).recorded == 2


def test_bad_workloads_are_refused() -> None:
    for limit in (0, -1, 2.5, True):
        with pytest.raises(BadInput, match=f"^max_tokens: got {limit}, expected a whole number from 1"):
            Workload(CHATS, max_tokens=limit)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^prefixes: got .*expected none, for the trace recorded has its own"):
        Workload(TRACE, prefixes=RUBRICS)
    with pytest.raises(BadInput, match=r"^prefixes: got SharedPrefixes"):
        Workload.replay(TRACE, prefixes=RUBRICS)
    with pytest.raises(BadInput, match=r"^trace: got 'recorded', expected a trace with arrival times"):
        Workload.replay(TIMELESS)
    for speed in (0, -1, math.nan, math.inf):
        with pytest.raises(BadInput, match=r"^speed: got .*expected a number from 1e-09"):
            Workload.replay(TRACE, speed=speed)


def test_a_bad_number_of_requests_is_refused_at_once() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(BadInput, match=r"^count: got 5, expected at most the 4 recorded requests"):
        Workload.replay(TRACE).requests(rng, 5)
    for count in (-1, 2.0, None):
        with pytest.raises(BadInput, match=r"^count: .*expected a whole number from 0"):
            Workload(CHATS).requests(rng, count)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^block: got 0, expected a whole number from 1"):
        Workload(CHATS).requests(rng, 5, block=0)
