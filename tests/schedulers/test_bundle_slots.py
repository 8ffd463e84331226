"""Slots of a bundle: nothing lost, nothing seated twice, running sums equal to a recount."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.bundle_slots import REFILL_POLICIES, BundleSlots, Refill, refill_fcfs, refill_least_loaded

policies = st.sampled_from(sorted(REFILL_POLICIES))


def drive(slots: BundleSlots, lives: list[int], check: Callable[[], None]) -> list[int]:
    """Run until empty: request i leaves after lives[i] steps. Returns ids in order of completion."""
    remaining = dict(enumerate(lives))
    finished: list[int] = []
    while slots.waiting or any(row.requests for row in slots.microbatches):
        for index in range(len(slots.microbatches)):
            microbatch = slots.begin_step(index)
            check()
            if microbatch is None:
                continue
            for request in microbatch.resident:
                remaining[request] -= 1
            ready = [request for request in microbatch.resident if remaining[request] == 0]
            slots.end_step(microbatch, ready)
            check()
            finished += ready
    return finished


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    policies,
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), max_size=60),
)
def test_every_request_is_served_once_and_the_sums_hold(
    instances: int, microbatches: int, batch: int, policy: str, requests: list[tuple[int, int]]
) -> None:
    slots = BundleSlots(instances, microbatches, batch, REFILL_POLICIES[policy])
    slots.submit((identity, prompt) for identity, (prompt, _) in enumerate(requests))
    finished = drive(slots, [life for _, life in requests], slots.check_integrity)
    assert sorted(finished) == list(range(len(requests)))
    assert all(microbatch.loads == [0] * instances for microbatch in slots.microbatches)


@pytest.mark.parametrize("policy", REFILL_POLICIES.values())
def test_who_enters_is_first_come_first_served(policy: Refill) -> None:
    slots = BundleSlots(3, 1, 2, policy)
    slots.submit((identity, 10 * identity) for identity in range(20))
    microbatch = slots.begin_step(0)
    assert sorted(microbatch.admitted) == list(range(6))
    slots.end_step(microbatch, [4, 1])
    again = slots.begin_step(0)
    assert sorted(again.admitted) == [6, 7]


def test_first_requests_spread_over_instances() -> None:
    slots = BundleSlots(4, 1, 8, refill_fcfs)
    slots.submit((identity, 1) for identity in range(6))
    microbatch = slots.begin_step(0)
    assert microbatch.active == [2, 2, 1, 1]


def test_load_is_prompt_plus_generated_and_starts_at_the_prompt() -> None:
    slots = BundleSlots(1, 1, 2, refill_fcfs)
    slots.submit([(0, 100), (1, 7)])
    microbatch = slots.begin_step(0)
    assert microbatch.loads == [107]
    slots.end_step(microbatch, [])
    assert microbatch.loads == [109]
    slots.end_step(microbatch, [0])
    assert microbatch.loads == [9]


def test_least_loaded_pairs_the_longest_prompt_with_the_lightest_instance() -> None:
    slots = BundleSlots(2, 1, 2, refill_least_loaded)
    slots.submit([(0, 50), (1, 10), (2, 40), (3, 30)])
    microbatch = slots.begin_step(0)
    # 50 | 40, then 30 goes to the instance with 40, then 10 to the one place left.
    assert sorted(microbatch.loads) == [60, 70]


def test_who_is_not_there_cannot_finish() -> None:
    slots = BundleSlots(1, 1, 1, refill_fcfs)
    slots.submit([(0, 1)])
    microbatch = slots.begin_step(0)
    assert microbatch is not None
    with pytest.raises(KeyError):
        slots.end_step(microbatch, [5])


def test_integrity_check_speaks_up() -> None:
    slots = BundleSlots(2, 1, 2, refill_fcfs)
    slots.submit([(0, 5), (1, 6)])
    microbatch = slots.begin_step(0)
    slots.check_integrity()
    microbatch.loads[0] += 1
    with pytest.raises(AssertionError, match="running"):
        slots.check_integrity()
