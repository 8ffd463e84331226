"""Admission control: limits hold, counts are right, and Retry-After is a place in the queue times the drain time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.admission_control import FIRST_RETRY_AFTER, AdmissionLimits, RequestShed, WaitingLimits
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.sequence import WAITING
from tests.schedulers.plant import Plant, Visit, check_ends
from workloads.request import Request

stories = st.lists(
    st.builds(
        Visit, at=st.integers(0, 40), service_class=st.sampled_from("ab"), model=st.sampled_from("xy"),
        prompt=st.integers(1, 20), limit=st.integers(1, 12), abort=st.none() | st.none() | st.integers(0, 9),
        priority=st.sampled_from([0, 1, 3]),
    ),
    min_size=1, max_size=60,
)  # fmt: skip
limits = st.builds(
    AdmissionLimits,
    st.builds(WaitingLimits, st.integers(0, 8), st.integers(0, 90)),
    st.builds(lambda limit: (("a", limit),), st.builds(WaitingLimits, st.integers(0, 4), st.integers(0, 40))),
    st.integers(0, 4),
    st.sampled_from([float("inf"), 0.5, 2.0]),
)


@given(stories, limits, st.sampled_from(["fcfs", "priority", "deadline", "fair"]), st.integers(8, 30))
def test_limits_hold_and_every_request_ends_once(
    story: list[Visit], limits: AdmissionLimits, policy: str, blocks: int
) -> None:
    """Blocks are few, so that sequences are preempted; some requests are aborted. Goals are priorities, in seconds."""
    config = EngineConfig(
        num_gpu_blocks=blocks, block_size=4, prefix_id_tokens=4, max_num_seqs=3, max_num_batched_tokens=16,
        scheduling_policy=policy, admission_control=limits,
    )  # fmt: skip

    class Limited(Plant):
        def _turn(self, clock: int) -> int:
            _check_limits(self.core, limits)
            return super()._turn(clock)

    check_ends(Limited(config, None, 1).run(story), story)


def _check_limits(core: EngineCore, limits: AdmissionLimits) -> None:
    fresh = [sequence for sequence in core.sequences.values() if sequence.state == WAITING and not sequence.preemptions]
    if limits.of_all.max_waiting:
        assert len(fresh) <= limits.of_all.max_waiting
    ((name, of_class),) = limits.of_class
    if of_class.max_waiting:
        assert sum(row.request.service_class == name for row in fresh) <= of_class.max_waiting
    if limits.max_waiting_per_tenant:
        for tenant in "xy":
            assert sum(row.request.tenant == tenant for row in fresh) <= limits.max_waiting_per_tenant
    if limits.of_all.max_waiting_tokens:  # the last one may pass the limit
        assert sum(row.request.prompt_tokens for row in fresh) < limits.of_all.max_waiting_tokens + 20


def engine(limits: AdmissionLimits, policy: str = "fcfs") -> EngineCore:
    return EngineCore(
        EngineConfig(num_gpu_blocks=100, max_num_seqs=1, scheduling_policy=policy, admission_control=limits)
    )


def play(core: EngineCore, steps: int, start: int = 0) -> None:
    """Steps of a second each."""
    for step in range(start, start + steps):
        batch = core.begin_step(float(step))
        if batch is not None:
            core.end_step(batch, (), float(step + 1))


def test_retry_after_is_the_queue_times_the_drain_interval() -> None:
    """Services of four seconds: with three waiting, it is three intervals of four seconds until none does."""
    core = engine(AdmissionLimits(WaitingLimits(max_waiting=3)))
    for number in range(3):
        core.submit(Request(number, 0.0, 1, 4), 0.0)
    with pytest.raises(RequestShed) as first:
        core.submit(Request(8, 0.0, 1, 4), 0.0)
    assert first.value.retry_after == FIRST_RETRY_AFTER  # nothing is known yet
    play(core, 10)
    for number in (3, 4, 5):
        core.submit(Request(number, 10.0, 1, 4), 10.0)
    with pytest.raises(RequestShed) as later:
        core.submit(Request(9, 10.0, 1, 4), 10.0)
    assert (later.value.reason, later.value.retry_after) == ("waiting", 12.0)


def test_a_goal_that_the_queue_does_not_allow() -> None:
    """Four seconds a place: a goal of 9 s allows two places before it, and no third."""
    core = engine(AdmissionLimits(ttft_factor=1.0))
    for number in range(3):
        core.submit(Request(number, 0.0, 1, 4, ttft_goal=9.0), 0.0)
    play(core, 9)
    core.submit(Request(3, 9.0, 1, 4, ttft_goal=9.0), 9.0)
    core.submit(Request(4, 9.0, 1, 4, ttft_goal=9.0), 9.0)
    core.submit(Request(5, 9.0, 1, 4, ttft_goal=9.0), 9.0)
    with pytest.raises(RequestShed) as shed:
        core.submit(Request(6, 9.0, 1, 4, ttft_goal=9.0), 9.0)
    assert (shed.value.reason, shed.value.retry_after) == ("ttft", 4.0)  # 12 s less the goal, at least an interval
    core.submit(Request(7, 9.0, 1, 4, ttft_goal=13.0), 9.0)
    core.submit(Request(8, 9.0, 1, 4), 9.0)  # without a goal


def test_a_tenant_is_limited_by_its_own_requests() -> None:
    core = engine(AdmissionLimits(max_waiting_per_tenant=2))
    for number, tenant in enumerate("xxyy"):
        core.submit(Request(number, 0.0, 1, 4, tenant=tenant), 0.0)
    with pytest.raises(RequestShed) as shed:
        core.submit(Request(4, 0.0, 1, 4, tenant="x"), 0.0)
    assert shed.value.reason == "tenant_waiting"


@pytest.mark.parametrize(
    ("policy", "shed"), [("fcfs", True), ("priority", False), ("deadline", False), ("fair", False)]
)
def test_the_prediction_follows_the_order(policy: str, shed: bool) -> None:
    """Behind twenty others of a tenant, an urgent request of another tenant waits in one order alone."""
    core = engine(AdmissionLimits(ttft_factor=1.0), policy)
    for number in range(20):
        core.submit(Request(number, 0.0, 1, 4, tenant="flood", priority=1, ttft_goal=1000.0), 0.0)
    play(core, 9)
    urgent = Request(20, 9.0, 1, 4, tenant="modest", ttft_goal=9.0)
    if shed:
        with pytest.raises(RequestShed):
            core.submit(urgent, 9.0)
    else:
        core.submit(urgent, 9.0)


def test_limits_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"admission_control.max_waiting: expected 0 \(no limit\) or more, found -1"):
        WaitingLimits(max_waiting=-1)
