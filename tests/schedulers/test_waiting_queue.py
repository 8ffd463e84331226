"""Waiting queues: who is next under each order, and that those who left are passed over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.scheduling_policies import SCHEDULING_POLICIES, KeyOrder, KeyQueue
from schedulers.sequence import FINISHED, Sequence
from workloads.request import Request


def sequence(number: int, prompt: int = 10, priority: int = 0) -> Sequence:
    """One that came at 2,000 s less its number, and whose first token is due 1 to 3 s later, by priority."""
    request = Request(number, 2000.0 - number, prompt, 5, priority=priority, ttft_goal=2.0 + min(priority, 1))
    return Sequence(request, number, False)


def queue_of(policy: str) -> KeyQueue:
    order = SCHEDULING_POLICIES[policy]()
    assert isinstance(order, KeyOrder)
    return order.make_queue()


def drain(queue: KeyQueue) -> list[int]:
    order = []
    while queue.peek() is not None:
        order.append(queue.pop().seq_id)
    return order


def leave(queue: KeyQueue, sequence: Sequence) -> None:
    queue.remove(sequence)
    sequence.state = FINISHED


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", [0, 1, 2, 3, 4]),
        ("priority", [4, 1, 2, 0, 3]),
        ("shortest_prompt", [3, 0, 2, 1, 4]),
        ("deadline", [4, 1, 2, 3, 0]),
    ],
)
def test_orders(order: str, expected: list[int]) -> None:
    queue = queue_of(order)
    for number, prompt, priority in ((4, 40, -1), (2, 20, 0), (0, 20, 0), (3, 10, 7), (1, 30, -1)):
        queue.push(sequence(number, prompt, priority))
    assert queue.count == 5
    assert drain(queue) == expected
    assert queue.count == 0


def test_whoever_was_preempted_goes_ahead_of_later_arrivals() -> None:
    queue = queue_of("fcfs")
    for number in (2, 3):
        queue.push(sequence(number))
    preempted = sequence(1)
    preempted.num_tokens_to_compute = 14  # its prompt, and four tokens that it had
    queue.requeue(preempted)
    assert queue.peek() is preempted
    assert queue.peek_key() == (0, 1)
    assert drain(queue) == [1, 2, 3]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(-2, 2), st.booleans()), max_size=40),
    st.sampled_from(sorted(set(SCHEDULING_POLICIES) - {"fair", "lpm"})),
)
def test_those_who_left_are_passed_over(crowd: list[tuple[int, int, bool]], order: str) -> None:
    queue = queue_of(order)
    everybody = [sequence(number, prompt, priority) for number, (prompt, priority, _) in enumerate(crowd)]
    for row in everybody:
        queue.push(row)
    for row, (_, _, leaves) in zip(everybody, crowd, strict=True):
        if leaves:
            leave(queue, row)
    staying = [row for row, (_, _, leaves) in zip(everybody, crowd, strict=True) if not leaves]
    assert queue.count == len(staying)
    assert set(queue.sequences()) == set(staying)
    assert drain(queue) == [row.seq_id for row in sorted(staying, key=queue.sort_key)]


def test_those_who_left_do_not_pile_up() -> None:
    queue = queue_of("fcfs")
    queue.push(sequence(0))
    for number in range(1, 1000):
        later = sequence(number)
        queue.push(later)
        leave(queue, later)
        assert len(queue._heap) < 70
    assert drain(queue) == [0]
