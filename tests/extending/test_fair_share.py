"""A scheduling policy that depends on past service: virtual token counters (VTC; Sheng et al., OSDI 2024).

The policy is all of `FairShare` and `FairQueue`. A plug-in has the same content and registers it under a name.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest

from schedulers.engine_config import EngineConfig, OneShotBudget
from schedulers.engine_core import EngineCore
from schedulers.sequence import Sequence
from schedulers.waiting_queue import SCHEDULING_POLICIES
from tests.schedulers.plant import Plant, Visit
from tests.twin.serving.scenarios import records, run, scenario
from workloads.request import Request

OUTPUT_WEIGHT = 2


def client_of(sequence: Sequence) -> str:
    return f"{sequence.request.model}/{sequence.request.task}"


class FairShare:
    """The client with the least service goes first: its prompt tokens plus twice its output tokens.

    A client that comes back after a pause starts from the smallest counter of the clients that wait, so that it cannot
    save up service (VTC, algorithm 2).
    """

    follows_service = True

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._outputs: dict[Sequence, int] = {}

    def make_queue(self) -> FairQueue:
        return FairQueue(self)

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        self.served[client_of(sequence)] += num_tokens

    def on_output(self, sequence: Sequence, num_output_tokens: int) -> None:
        new = num_output_tokens - self._outputs.get(sequence, 0)
        self.served[client_of(sequence)] += OUTPUT_WEIGHT * new
        self._outputs[sequence] = num_output_tokens


class FairQueue:
    """One first-come, first-served line for each client."""

    def __init__(self, policy: FairShare) -> None:
        self.policy = policy
        self.count = 0
        self._lines: dict[str, deque[Sequence]] = {}

    def push(self, sequence: Sequence) -> None:
        client, policy = client_of(sequence), self.policy
        if not policy.waiting[client]:
            served = [policy.served[tenant] for tenant, waiting in policy.waiting.items() if waiting]
            policy.served[client] = max(policy.served[client], min(served, default=0))
        self._enter(sequence).append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        self._enter(sequence).appendleft(sequence)

    def _enter(self, sequence: Sequence) -> deque[Sequence]:
        self.count += 1
        self.policy.waiting[client_of(sequence)] += 1
        return self._lines.setdefault(client_of(sequence), deque())

    def _leave(self, sequence: Sequence) -> None:
        self.count -= 1
        self.policy.waiting[client_of(sequence)] -= 1

    def peek(self) -> Sequence | None:
        heads = [line[0] for line in self._lines.values() if line]
        return min(heads, key=self._key, default=None)

    def peek_key(self) -> tuple[float, int]:
        head = self.peek()
        assert head is not None
        return self._key(head)

    def pop(self) -> Sequence:
        head = self.peek()
        assert head is not None
        self._leave(head)
        return self._lines[client_of(head)].popleft()

    def remove(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._lines[client_of(sequence)].remove(sequence)

    def _key(self, sequence: Sequence) -> tuple[float, int]:
        return self.policy.served[client_of(sequence)], sequence.seq_id


@pytest.fixture(autouse=True)
def plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULING_POLICIES, "fair_share", FairShare)


def served(policy: str, steps: int = 120) -> Counter[str]:
    """Output tokens of two clients while both have a backlog; the first was there first."""
    config = EngineConfig(num_gpu_blocks=400, max_num_seqs=4, max_num_batched_tokens=64, scheduling_policy=policy)
    core, tokens = EngineCore(config), Counter[str]()
    for number in range(120):
        model = "greedy" if number < 60 else "modest"
        core.submit(Request(number, 0.0, 20, 10, model=model), 0.0)
    for _ in range(steps):
        batch = core.begin_step(0.0)
        assert batch is not None
        tokens.update(sequence.request.model for sequence in batch.decodes)
        core.end_step(batch, (), 0.0)
    return tokens


def test_clients_with_a_backlog_get_equal_service() -> None:
    assert served("fcfs")["modest"] == 0
    fair = served("fair_share")
    # VTC's bound: counters of backlogged clients differ by one batch at most, here four requests of 10 output tokens.
    assert abs(fair["greedy"] - fair["modest"]) <= 40
    assert min(fair.values()) > 150


def test_a_client_that_returns_has_not_saved_up_service() -> None:
    config = EngineConfig(num_gpu_blocks=400, max_num_seqs=1, max_num_batched_tokens=64, scheduling_policy="fair_share")
    core, order = EngineCore(config), []
    for number in range(6):
        core.submit(Request(number, 0.0, 20, 5, model="steady"), 0.0)
    for step in range(200):
        if step == 10:
            for number in range(6, 12):
                core.submit(Request(number, 0.0, 20, 5, model="returning"), 0.0)
        batch = core.begin_step(0.0)
        if batch is None:
            break
        order += [chunk.sequence.request.model[0] for chunk in batch.chunks]
        core.end_step(batch, (), 0.0)
    # Each request takes 5 steps and 30 units of service. At step 10 the steady client has had 60 units, and the
    # returning one starts from there; of equals the older request goes first.
    assert "".join(order) == "sss" + "rs" * 3 + "rrr"


@pytest.mark.parametrize("depth", [1, 2])
def test_stories_end_well(depth: int) -> None:
    """Preemptions, aborts and two queues: `Plant` checks every step, and that every request ends."""
    config = EngineConfig(
        num_gpu_blocks=14, block_size=4, prefix_id_tokens=4, max_num_batched_tokens=24, max_num_seqs=4,
        scheduling_policy="fair_share", one_shot=OneShotBudget(tokens=16, sequences=2),
    )  # fmt: skip
    story = []
    for i in range(40):
        generates = i % 4 > 0
        task, limit = ("generate", 2 + 5 * i % 17) if generates else ("classify", 0)
        abort = 4 if i % 7 == 6 else None
        story.append(Visit(i // 3, 3 + i % 9, limit, task=task, model="ab"[i % 2], abort=abort))
    plant = Plant(config, None, depth).run(story)
    assert plant.core.preemptions > 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_scenario_names_it_and_fast_forwarding_changes_nothing(asynchronous: bool) -> None:
    document: dict[str, Any] = scenario(
        workload={"arrivals": {"process": "poisson", "rate": 60.0}},
        engine={"scheduling_policy": "fair_share", "max_num_seqs": 4, "async_scheduling": asynchronous},
    )
    fast, slow = (run({**document, "fast_forward": mode}) for mode in (True, False))
    assert records(fast) == records(slow)
