"""Virtual times of roles that run in turns, with CPU times that the tests choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from random import Random

import numpy as np
import pytest
import torch

from latency_models.stages import MessageLink
from live.topologies.bundle.coordinator import BundleLayout
from live.topologies.direct_time import DirectTime, RoleTime
from live.topologies.local import LocalNetwork, LocalTransport, Timekeeper
from live.topologies.transport import (
    Computing,
    Form,
    Message,
    Payload,
    Receive,
    ReceiveAny,
    Role,
    received,
)
from live.validation.bundle import MeasuredBundle, run_in_turns
from reports.metrics import Transfers, bundle_metrics
from tests.live.topologies.answers import local_bundle, make_decoder, outputs, requests, serve, settings

DATA = 2
FORMS = {DATA: Form(1, (Payload(torch.float32, 1000),))}


class Cpu:
    """CPU time that passes only by `work`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def work(self, seconds: float) -> None:
        self.seconds += seconds


def data(number: int, size: int = 0) -> Message:
    """A message of this many bytes."""
    return Message(DATA, (number,), (torch.zeros(size // 4),))


Make = Callable[[LocalTransport], Role]


def run(makes: Mapping[int, Make], timekeeper: Timekeeper | None = None) -> LocalNetwork:
    """Run roles to their ends; they start in the order of the mapping."""
    network = LocalNetwork(FORMS, timekeeper)
    network.start({rank: make(network.transport(rank)) for rank, make in makes.items()})
    network.run()
    assert network.ended
    return network


def acting(cpu: Cpu, *actions: float | tuple[int, Message] | Receive | list[float]) -> Make:
    """A role that works for so many seconds, sends a message to a rank, receives, or notes its clock, one by one."""

    def make(transport: LocalTransport) -> Role:
        for action in actions:
            if isinstance(action, Receive):
                yield action
            elif isinstance(action, float):
                cpu.work(action)
            elif isinstance(action, list):
                action.append(transport.clock())
            else:
                transport.send(*action)

    return make


def test_ping_pong_over_a_link() -> None:
    cpu, clocks = Cpu(), list[float]()
    # What it works after sending, the message does not wait for.
    ping = acting(cpu, 2.0, (1, data(0, 400)), 0.25, Receive(1), clocks, 1.0, clocks)
    pong = acting(cpu, 1.0, Receive(0), clocks, 3.0, (0, data(0, 800)))
    time = DirectTime(MessageLink(latency=0.5, bandwidth=800.0), cpu)
    run({0: ping, 1: pong}, time)
    assert clocks == [3.0, 7.5, 8.5]  # 2 + 0.5 + 400/800; 3 + 3 + 0.5 + 800/800; and its work
    assert time.roles == {0: RoleTime(8.5, busy=3.25, waiting=5.25), 1: RoleTime(6.0, busy=4.0, waiting=2.0)}
    assert time.transfers == {(0, 1): Transfers(1, 400, 1.0), (1, 0): Transfers(1, 800, 1.5)}
    time.restart()
    assert (time.now(0), time.transfers) == (0.0, {})


def test_sending_and_receiving_take_the_overhead_of_the_link() -> None:
    cpu = Cpu()
    source = acting(cpu, 1.0, (1, data(0)), (1, data(1)), 1.0)
    time = DirectTime(MessageLink(latency=2.0, overhead=0.5), cpu)
    run({0: source, 1: acting(cpu, Receive(0), Receive(0))}, time)
    # Sent at 1.5 and 2, arrived at 3.5 and 4, when the receiver has just taken the first.
    assert time.roles == {0: RoleTime(3.0, busy=3.0, waiting=0.0), 1: RoleTime(4.5, busy=1.0, waiting=3.5)}


def test_a_message_that_has_come_is_not_waited_for() -> None:
    cpu = Cpu()
    time = DirectTime(MessageLink(latency=1.0), cpu)
    run({0: acting(cpu, (1, data(0))), 1: acting(cpu, 5.0, Receive(0))}, time)
    assert time.roles[1] == RoleTime(5.0, busy=5.0, waiting=0.0)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_lowest_clock_goes_first(order: tuple[int, ...]) -> None:
    """Rank 0 takes rank 3's message (time 8) before rank 1's (10), which is sent while rank 3 waits for rank 2."""
    cpu, arrivals = Cpu(), list[tuple[int, float]]()

    def taker(transport: LocalTransport) -> Role:
        cpu.work(5.0)
        for _ in range(2):
            number = received((yield ReceiveAny((1, 3), wait=True))).fields[0]
            arrivals.append((number, transport.clock()))

    early = acting(cpu, 10.0, (0, data(1)))
    first = acting(cpu, 7.0, (3, data(2)))
    second = acting(cpu, Receive(2), 1.0, (0, data(3)))
    makes = (taker, early, first, second)
    run({rank: makes[rank] for rank in order}, DirectTime(cpu=cpu))
    assert arrivals == [(3, 8.0), (1, 10.0)]


def test_a_role_that_does_not_wait_gets_only_what_has_arrived() -> None:
    cpu, arrivals = Cpu(), list[float | None]()

    def poller(transport: LocalTransport) -> Role:
        for _ in range(4):
            message = yield ReceiveAny((1,), wait=False)
            arrivals.append(None if message is None else transport.clock())
            cpu.work(1.0)

    run({0: poller, 1: acting(cpu, (0, data(0)))}, DirectTime(MessageLink(latency=1.5), cpu))
    assert arrivals == [None, None, 2.0, None]


@pytest.mark.parametrize("seed", range(3))
def test_times_do_not_depend_on_the_order_in_which_roles_start(seed: int) -> None:
    """Workers report to rank 0 in the order of their clocks, and it sends the next piece of work to each."""

    def times(order: tuple[int, ...]) -> tuple[list[tuple[int, float]], dict[int, RoleTime]]:
        cpu, random, log = Cpu(), Random(seed), list[tuple[int, float]]()
        work = {rank: [random.random() for _ in range(8)] for rank in range(4)}

        def front(transport: LocalTransport) -> Role:
            for _ in range(3 * 8):
                source = received((yield ReceiveAny((1, 2, 3), wait=True))).fields[0]
                log.append((source, transport.clock()))
                cpu.work(0.05)
                transport.send(source, data(0, 40))

        def worker(transport: LocalTransport) -> Role:
            for seconds in work[transport.rank]:
                cpu.work(seconds)
                transport.send(0, data(transport.rank, 400))
                yield Receive(0)

        makes = (front, worker, worker, worker)
        time = DirectTime(MessageLink(0.01, 1e4), cpu)
        run({rank: makes[rank] for rank in order}, time)
        return log, time.roles

    log, roles = times((0, 1, 2, 3))
    assert [clock for _, clock in log] == sorted(clock for _, clock in log)
    for order in permutations(range(4)):
        other_log, other_roles = times(order)
        assert [source for source, _ in other_log] == [source for source, _ in log]
        # The sums are not in order.
        assert [clock for _, clock in other_log] == pytest.approx([clock for _, clock in log])
        assert {rank: other_roles[rank].waiting for rank in roles} == pytest.approx(
            {rank: roles[rank].waiting for rank in roles}
        )


@pytest.mark.parametrize(("model", "packed"), [("llama", False), ("qwen3", True), ("qwen3-moe", False)])
def test_tokens_are_those_by_wall_time(model: str, packed: bool) -> None:
    decoder, tokens = make_decoder(model), []
    timekeepers: list[Timekeeper | None] = [None, DirectTime(MessageLink(1e-4, 1e6)), DirectTime()]
    for timekeeper in timekeepers:
        bundle = local_bundle(
            BundleLayout(2, 1, 2, settings(2)), decoder, timekeeper=timekeeper, packed=packed and timekeeper is not None
        )
        generations = requests(12)
        serve(bundle, generations)
        tokens.append(outputs(generations))
        if isinstance(timekeeper, DirectTime):
            for generation in generations:
                assert 0 <= generation.submitted <= generation.scheduled <= generation.first_token
                assert generation.first_token <= generation.last_token
            assert all(role.now == pytest.approx(role.busy + role.waiting) for role in timekeeper.roles.values())
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(("microbatches", "end", "stable_tokens"), [(1, 48e-3, 16), (2, 50e-3, 28)])
def test_metrics_of_a_bundle_whose_work_takes_no_time(microbatches: int, end: float, stable_tokens: int) -> None:
    """A step is six messages of 1 ms each: a command, there and back in both layers, and the result.

    Two generations of requests have four steps each. The second microbatch is 2 ms later: after the first step of the
    first one, the attention instance waits for the coordinator.
    """
    cpu, slots = Cpu(), 2 * microbatches
    lengths = np.full(3 * slots, 3), np.full(3 * slots, 4)
    bundle = MeasuredBundle(
        BundleLayout(1, 1, microbatches, settings(2)), make_decoder("llama"), *lengths, 2 * slots,
        time=DirectTime(MessageLink(latency=1e-3), cpu),
    )  # fmt: skip
    metrics = bundle_metrics(run_in_turns([bundle])[0].times)
    assert metrics.tpot_gaps == pytest.approx(6e-3)
    assert metrics.tpot == pytest.approx(3 / 4 * 6e-3)
    assert metrics.total_time == pytest.approx(end)
    assert metrics.throughput == pytest.approx(stable_tokens / end / 2)  # 80 % of the requests, rounded up
    assert metrics.throughput_generated == pytest.approx(2 * slots * 4 / end / 2)
    assert (metrics.idle_attention, metrics.idle_ffn) == (1.0, 1.0)
    assert (metrics.requests, metrics.steps) == (2 * slots, 8 * microbatches)
    assert metrics.attention_to_ffn.messages >= 2 * metrics.steps
    per_message = metrics.ffn_to_attention.seconds / metrics.ffn_to_attention.messages
    assert per_message == pytest.approx(1e-3)


def test_a_measured_bundle_needs_requests_for_its_completions() -> None:
    with pytest.raises(ValueError, match="at most the 2 requests as completions, found 3"):
        MeasuredBundle(BundleLayout(1, 1, 1, settings(2)), make_decoder("llama"), np.ones(2, int), np.ones(2, int), 3)


def computing(name: str, log: list[str], done: bool) -> Role:
    """Launches twice, each time waits for its kernels, and collects their output."""
    for _ in range(2):
        log.append(f"{name} launches")
        yield Computing(lambda: done, lambda: log.append(f"{name} is waited for"))
        log.append(f"{name} collects")


def computed(**done: bool) -> list[str]:
    log: list[str] = []
    network = LocalNetwork({})
    network.start({rank: computing(name, log, is_done) for rank, (name, is_done) in enumerate(done.items())})
    network.run()
    assert network.ended
    return log


def test_all_launch_before_the_host_waits() -> None:
    assert computed(a=False, b=False)[:4] == ["a launches", "b launches", "a is waited for", "a collects"]


def test_kernels_that_are_done_are_not_waited_for() -> None:
    """Role b goes on twice while a's kernels run."""
    assert computed(a=False, b=True) == [
        "a launches", "b launches", "b collects", "b launches", "b collects",
        "a is waited for", "a collects", "a launches", "a is waited for", "a collects",
    ]  # fmt: skip
