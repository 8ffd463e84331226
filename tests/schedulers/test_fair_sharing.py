"""Fair sharing: VTC's theorem (Sheng et al., OSDI 2024), which first come, first served violates; lifts; weights."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.fair_sharing import FairSharing
from schedulers.sequence import DECODING, WAITING, Sequence
from workloads.request import Request

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0

Jobs = list[tuple[int, str, int, int]]
"""Step of arrival, tenant, prompt and output tokens of each request."""


class Books:
    """Runs jobs on a core, and keeps accounts that do not use the policy's.

    Attributes:
        served: service of each tenant so far. backlogged: tenants that wait for the whole of the step.
        rows: both, after each step.
    """

    def __init__(self, config: EngineConfig, jobs: Jobs) -> None:
        self.core = EngineCore(config)
        self.jobs = jobs
        self.served = {tenant: 0.0 for _, tenant, _, _ in jobs}
        self.rows: list[tuple[dict[str, float], set[str]]] = []
        self.counters: list[dict[str, float]] = []
        self._charged: set[int] = set()

    def run(self) -> Books:
        step, last = 0, max(at for at, *_ in self.jobs)
        while step <= last or self.core.sequences:
            for number, (at, tenant, prompt, output) in enumerate(self.jobs):
                if at == step:
                    self.core.submit(Request(number, 0.0, prompt, output, tenant=tenant), 0.0)
            batch = self.core.begin_step(0.0)
            if batch is not None:
                self._account(batch)
                self.core.end_step(batch, (), 0.0)
            waiting = {
                sequence.request.tenant for sequence in self.core.sequences.values() if sequence.state == WAITING
            }
            self.rows.append((dict(self.served), waiting))
            if isinstance(self.core.scheduling_policy, FairSharing):
                for sequence in self.core.sequences.values():
                    if sequence.state == DECODING:
                        self.core.scheduling_policy.on_output(
                            sequence, self.core.decode_set.num_output_tokens(sequence)
                        )
                self.counters.append({name: self.core.scheduling_policy.counter(name) for name in waiting})
            step += 1
        return self

    def _account(self, batch: Batch) -> None:
        for chunk in batch.chunks:
            if chunk.sequence.request.id not in self._charged:
                self._charged.add(chunk.sequence.request.id)
                self._serve(chunk.sequence, PROMPT_WEIGHT * chunk.sequence.request.prompt_tokens)
            if chunk.last:
                self._serve(chunk.sequence, OUTPUT_WEIGHT)
        for sequence in batch.decodes:
            self._serve(sequence, OUTPUT_WEIGHT)

    def _serve(self, sequence: Sequence, service: float) -> None:
        self.served[sequence.request.tenant] += service

    def largest_difference(self, first: str, second: str) -> float:
        """The largest |W_one(t1, t2) - W_other(t1, t2)| over spans in which both are backlogged throughout."""
        largest, span = 0.0, list[float]()
        for served, waiting in self.rows:
            if {first, second} <= waiting:
                span.append(served[first] - served[second])
                largest = max(largest, max(span) - min(span))
            else:
                span = []
        return largest


def config(policy: str, slots: int = 4, budget: int = 32, blocks: int = 30, **parameters: Any) -> EngineConfig:
    """Blocks of 4 tokens, reserved for whole answers: VTC does not preempt."""
    return EngineConfig(
        num_gpu_blocks=blocks, block_size=4, prefix_id_tokens=4, max_num_seqs=slots, max_num_batched_tokens=budget,
        kv_reservation="max_tokens", scheduling_policy=policy, scheduling_parameters=parameters,
    )  # fmt: skip


def bound(core: EngineCore, jobs: Jobs) -> float:
    """U = max(w_p · L_input, w_q · M), where M tokens fit into a running batch."""
    longest = max(prompt for _, _, prompt, _ in jobs)
    return max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * core.kv_cache.num_blocks * core.kv_cache.block_size)


jobs = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from("abbbbc"), st.integers(1, 40), st.integers(1, 20)),
    min_size=40, max_size=120,
)  # fmt: skip


@given(jobs, st.integers(1, 6), st.integers(8, 64), st.integers(15, 40))
def test_service_of_backlogged_tenants_differs_by_at_most_vtcs_bound(
    jobs: Jobs, slots: int, budget: int, blocks: int
) -> None:
    books = Books(config("fair", slots, budget, blocks), jobs).run()
    limit = bound(books.core, jobs)
    for counters in books.counters:  # lemma 4.3
        assert max(counters.values(), default=0.0) - min(counters.values(), default=0.0) <= limit
    for first, second in ("ab", "ac", "bc"):
        assert books.largest_difference(first, second) <= 2 * limit  # theorem 4.4


FLOOD: Jobs = [(0, "flood", 20, 10)] * 150 + [(1, "modest", 20, 10)] * 60


@pytest.mark.parametrize(("policy", "fair"), [("fair", True), ("fcfs", False), ("shortest_prompt", False)])
def test_orders_that_do_not_count_violate_the_bound(policy: str, fair: bool) -> None:
    books = Books(config(policy), FLOOD).run()
    assert (books.largest_difference("flood", "modest") <= 2 * bound(books.core, FLOOD)) is fair


def test_weights_are_shares() -> None:
    books = Books(config("fair", weights={"flood": 1, "modest": 3}), FLOOD).run()
    pair = [served for served, waiting in books.rows if {"flood", "modest"} <= waiting][-1]
    assert pair["modest"] / pair["flood"] == pytest.approx(3, rel=0.1)


def test_a_tenant_that_was_away_has_saved_up_nothing() -> None:
    """After 100 steps alone, `steady` is far ahead; `back` then gets no more than its half."""
    jobs = [(0, "steady", 20, 10)] * 100 + [(100, "back", 20, 10)] * 50
    books = Books(config("fair"), jobs).run()
    before = books.rows[99][0]["steady"]
    assert before > 4 * bound(books.core, jobs)
    assert books.largest_difference("steady", "back") <= 2 * bound(books.core, jobs)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), min_size=1, max_size=40))
def test_every_line_is_served_in_its_order(crowd: list[tuple[str, int, bool]]) -> None:
    """Without service, all counters are equal; who left is passed over."""
    policy = FairSharing()
    queue, staying = policy.make_queue(), []
    for number, (tenant, priority, leaves) in enumerate(crowd):
        sequence = Sequence(Request(number, 0.0, 5, 5, tenant=tenant, priority=priority), number, False)
        queue.push(sequence)
        if leaves:
            queue.remove(sequence)
            sequence.state = DECODING
        else:
            staying.append(sequence)
    assert set(queue.sequences()) == set(staying)
    order = []
    while queue.peek() is not None:
        order.append(queue.pop())
    assert queue.count == 0
    assert set(order) == set(staying)
    for tenant in "abc":
        rows = [row for row in order if row.request.tenant == tenant]
        assert rows == sorted(rows, key=lambda row: (row.request.priority, row.seq_id))


@given(st.integers(2, 30), st.integers(1, 12))
def test_counters_do_not_depend_on_how_many_steps_are_counted_at_a_time(outputs: int, stride: int) -> None:
    assume(stride <= outputs)
    counters = []
    for step in (1, stride):
        policy = FairSharing(0.1, 0.3, {"a": 0.7})
        sequence = Sequence(Request(0, 0.0, 5, 50, tenant="a"), 0, False)
        policy.on_scheduled(sequence, 5)
        for count in [*range(1, outputs, step), outputs]:
            policy.on_output(sequence, count)
        counters.append(policy.counter("a"))
    assert counters[0] == counters[1]


@pytest.mark.parametrize("parameters", [{"prompt_weight": 0}, {"output_weight": -1.0}, {"weights": {"a": 0.0}}])
def test_weights_that_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected a weight above 0"):
        FairSharing(**parameters)
