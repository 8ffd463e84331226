"""Attention instances that advance on their own: by hand, against a recursion of its own, and beside lockstep."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latency_models.stages import PassLatency
from schedulers.bundle_slots import FfnOrder
from twin.afd.bundle import Bundle, BundleConfig, Supply
from twin.afd.point import measure
from twin.theory.cycle import CycleModel, LoadLaw

# Attention takes as long as an instance has tokens; the FFN 1, the way there and back 2 together.
TOKENS = PassLatency(attention=(1.0, 0.0), ffn=(0.0, 1.0), communication=(0.0, 2.0))


def independent(x: int, batch: int, latency: PassLatency, microbatches: int = 2, **changes: object) -> BundleConfig:
    return BundleConfig(x, 1, batch, latency, microbatches, advance="independent", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_each_instance_goes_on_to_its_next_microbatch(fast_forward: bool) -> None:
    # Microbatch 0 holds prompts of 8 and 2 tokens, microbatch 1 of 2 and 8.
    supply = Supply.of([8, 2, 2, 8], [1, 1, 1, 1])
    config = independent(2, 1, TOKENS, fast_forward=fast_forward)
    steps = Bundle(config, supply).run().steps
    # Instance 0 computes 0-8 and 8-10, instance 1 0-2 and 2-10: microbatch 1 is complete at 11, when the FFN is free.
    assert [(row[0], row[2]) for row in steps] == [(0, 8 + 1 + 1 + 1), (1, 10 + 1 + 1 + 1)]
    # Waits are means over the instances: of 0 and 6 before the first FFN, of 8 and 2 before the second attention.
    assert [(row[3], row[4]) for row in steps] == [(0, 3), (5, 0)]
    lockstep = Bundle(replace(config, advance="lockstep"), supply).run().steps
    assert [row[2] for row in lockstep] == [11, 8 + 8 + 3]


@pytest.mark.parametrize("fast_forward", [True, False])
def test_only_instances_with_requests_are_waited_for(fast_forward: bool) -> None:
    config = independent(3, 1, TOKENS, microbatches=1, fast_forward=fast_forward)
    steps = Bundle(config, Supply.of([5], [1])).run().steps
    assert [(row[2], row[8]) for row in steps] == [(5 + 1 + 1 + 1, 1)]


@pytest.mark.parametrize(("order", "ends"), [("in_order", [(0, 23), (1, 25)]), ("first_ready", [(1, 12), (0, 23)])])
def test_the_ffn_takes_microbatches_in_order_or_when_they_are_complete(
    order: FfnOrder, ends: list[tuple[int, int]]
) -> None:
    latency = replace(TOKENS, ffn=(0.0, 2.0), communication=(0.0, 0.0))
    config = independent(2, 1, latency, ffn_order=order)
    supply = Supply.of([1, 20, 1], [1, 1, 1], arrivals=[1.0, 1.0, 9.0])
    # Two requests fill microbatch 0, and instance 1 computes its one of 20 tokens to 21. The third starts microbatch 1
    # on instance 0 at 9 and is complete at 10.
    assert [(row[0], row[2]) for row in Bundle(config, supply).run().steps] == ends


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), min_size=40, max_size=60),
    st.tuples(*[st.integers(0, 8).map(lambda eighths: eighths / 8)] * 5),
)
def test_a_recursion_gives_the_same_ends(
    x: int, m: int, batch: int, requests: list[tuple[int, int]], times: tuple[float, ...]
) -> None:
    """All durations are dyadic, so sums are exact."""
    latency = PassLatency((times[0], 0.5), (times[1], times[2] + 0.25), (times[3], times[4]))
    completions = len(requests) - x * m * batch
    prefill, decode = ([request[column] for request in requests] for column in (0, 1))
    supply = Supply.of(prefill, decode, None, completions)
    records = Bundle(independent(x, batch, latency, microbatches=m), supply).run()
    expected = ends_of_steps(x, m, batch, requests, latency)
    assert [row[2] for row in records.steps] == expected[: len(records.steps)]
    assert len(records.steps) >= completions // (x * batch)


def ends_of_steps(x: int, m: int, batch: int, requests: list[tuple[int, int]], latency: PassLatency) -> list[float]:
    """The ends of a closed loop's steps while all slots are full, by recursion over the steps in their cyclic order.

    The slots of a microbatch are emptied and filled as sets of (instance, tokens, tokens to come).
    """
    (alpha_a, beta_a), (alpha_f, beta_f), (alpha_c, beta_c) = latency.attention, latency.ffn, latency.communication
    each_way = (alpha_c * batch + beta_c) / 2
    waiting = deque(enumerate(requests))
    vacant = [deque(list(range(x)) * batch) for _ in range(m)]
    slots: list[list[list[int]]] = [[] for _ in range(m)]  # [request, instance, tokens, tokens to come]
    computed, departed = [0.0] * x, [0.0] * x
    taken_until = returned_until = 0.0
    back = [0.0] * m
    ends: list[float] = []
    while True:
        index = len(ends) % m
        while vacant[index]:
            if not waiting:
                return ends
            request, (prompt, answer) = waiting.popleft()
            slots[index].append([request, vacant[index].popleft(), prompt, answer])
        for instance in range(x):
            load = sum(slot[2] for slot in slots[index] if slot[1] == instance)
            computed[instance] = max(computed[instance], back[index]) + alpha_a * load + beta_a
            departed[instance] = max(departed[instance], computed[instance]) + each_way
        taken_until = max(taken_until, *departed) + alpha_f * x * batch + beta_f
        returned_until = max(returned_until, taken_until) + each_way
        back[index] = returned_until
        ends.append(returned_until)
        for slot in slots[index]:
            slot[2] += 1
            slot[3] -= 1
        vacant[index].extend(slot[1] for slot in sorted(slots[index]) if slot[3] == 0)
        slots[index] = [slot for slot in slots[index] if slot[3] > 0]


def random_supply(requests: int, seed: int) -> Supply:
    rng = np.random.default_rng(seed)
    decode = rng.geometric(0.02, requests)
    return Supply(rng.geometric(0.01, requests), decode, None, requests - 200)


def test_one_attention_instance_advances_as_in_lockstep() -> None:
    config = independent(1, 8, PassLatency((0.01, 1.0), (0.1, 2.0), (0.01, 0.5)), layers=2)
    supply = random_supply(1500, 1)
    assert Bundle(config, supply).run() == Bundle(replace(config, advance="lockstep"), supply).run()


def test_with_full_slots_the_order_of_the_ffn_makes_no_difference() -> None:
    config = independent(3, 8, PassLatency((0.01, 1.0), (0.1, 2.0), (0.01, 0.5)), microbatches=3, layers=2)
    supply = random_supply(1500, 2)
    in_order = Bundle(config, supply).run()
    first_ready = Bundle(replace(config, ffn_order="first_ready"), supply).run()
    assert [row[2] for row in first_ready.steps] == pytest.approx([row[2] for row in in_order.steps], rel=1e-12)


def test_it_is_never_slower_than_lockstep_and_its_states_add_up() -> None:
    config = independent(6, 8, PassLatency((0.01, 1.0), (0.05, 2.0), (0.01, 0.5)))
    supply = random_supply(4000, 3)
    records, lockstep = Bundle(config, supply).run(), Bundle(replace(config, advance="lockstep"), supply).run()
    assert records.steps[-1][2] < 0.98 * lockstep.steps[-1][2]
    shares = measure(config, supply, records, slot_load=150.0, warm_up=0).state_shares
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0
    each_way = (0.01 * 8 + 0.5) / 2
    lived = sum(row[2] - row[1] for row in records.steps)
    assert shares["a_to_f"] == pytest.approx(each_way * len(records.steps) / lived)


# -- theory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attention", "ffn", "link", "x", "m"),
    [
        (10.0, 4.0, 2.0, 4, 2), (10.0, 12.0, 2.0, 4, 3), (10.0, 9.0, 6.0, 12, 1), (10, 20, 1, 1, 2),
    ],
)  # fmt: skip
def test_the_period_is_that_of_instances_with_loads_of_their_own(
    attention: float, ffn: float, link: float, x: int, m: int
) -> None:
    """Loads that stay as they are drawn, in many bundles, each played until it repeats itself."""
    rng = np.random.default_rng(7)
    law = LoadLaw(np.array([0.0, 4.0]), np.array([0.0, 1.0]), 2.0)
    latency = PassLatency((1.0, attention - 2), (0.0, ffn), (0.0, link))
    played = [play(rng.uniform(0, 4, (x, m)) + attention - 2, ffn, link) for _ in range(400)]
    spread = np.std(played) / np.sqrt(len(played))
    model = CycleModel(latency, 1, m, [law], "independent")
    assert model.step_time(1.0, x) * m == pytest.approx(np.mean(played), abs=4 * spread + 2e-3)


def play(attention: np.ndarray, ffn: float, link: float) -> float:
    """The period of a bundle with fixed attention times, shape (x, m)."""
    x, m = attention.shape
    computed, back, ffn_end = np.zeros(x), np.zeros(m), 0.0
    turns = []
    for _ in range(60):
        for index in range(m):
            computed = np.maximum(computed, back[index]) + attention[:, index]
            ffn_end = max(ffn_end, float(computed.max()) + link / 2) + ffn
            back[index] = ffn_end + link / 2
        turns.append(back[0])
    return float(turns[-1] - turns[29]) / 30
