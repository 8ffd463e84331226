"""Earliest deadline first, on one server with equal services: if any order meets all deadlines, it does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from workloads.request import Request

Job = tuple[int, int]
"""Step of arrival, and steps until its first token is due."""


def first_tokens(policy: str, jobs: list[Job], service: int) -> list[int]:
    """The step after which each job has its first token, on an engine of one sequence."""
    core = EngineCore(EngineConfig(num_gpu_blocks=100, max_num_seqs=1, scheduling_policy=policy))
    ends, step = [0] * len(jobs), 0
    while step <= max(at for at, _ in jobs) or core.sequences:
        for number, (at, goal) in enumerate(jobs):
            if at == step:
                core.submit(Request(number, float(at), 1, service, ttft_goal=float(goal)), float(step))
        batch = core.begin_step(float(step))
        step += 1
        if batch is not None:
            for chunk in batch.chunks:
                ends[chunk.sequence.request.id] = step
            core.end_step(batch, (), float(step))
    return ends


def lateness(ends: list[int], jobs: list[Job]) -> int:
    """By how much the latest job is late; 0 or less if none is."""
    return max(end - at - goal for end, (at, goal) in zip(ends, jobs, strict=True))


def every_order(jobs: list[Job], service: int) -> Iterator[list[int]]:
    """First tokens under each permutation, with idle steps where the next job has not come."""
    for order in permutations(range(len(jobs))):
        free, ends = 0, [0] * len(jobs)
        for number in order:
            begin = max(free, jobs[number][0])
            ends[number], free = begin + 1, begin + service
        yield ends


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(2, 4))
def test_all_present_at_once(goals: list[int], service: int) -> None:
    jobs = [(0, goal) for goal in goals]
    best = min(lateness(ends, jobs) for ends in every_order(jobs, service))
    assert lateness(first_tokens("deadline", jobs, service), jobs) == best


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=6))
def test_arrivals_over_time_with_services_of_a_step(jobs: list[Job]) -> None:
    best = min(lateness(ends, jobs) for ends in every_order(jobs, 1))
    assert lateness(first_tokens("deadline", jobs, 1), jobs) == best


def test_first_come_first_served_misses_a_deadline_that_can_be_met() -> None:
    jobs = [(0, 9), (0, 9), (0, 1)]
    assert lateness(first_tokens("deadline", jobs, 2), jobs) <= 0
    assert lateness(first_tokens("fcfs", jobs, 2), jobs) == 4
