"""A link by hand: when each cache is sent, and what an interrupted transfer does to those behind it."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import simpy
from simpy.events import Event, Process

from twin.environment import Environment, Priority
from twin.serving.engine.links import Link, LinkSpeed

SPEED = LinkSpeed(bandwidth=100.0, latency=0.25, bytes_per_token=10.0)  # ten tokens a second


class Bench:
    """A link, the transfers over it, and when each cache arrived."""

    def __init__(self, speed: LinkSpeed = SPEED) -> None:
        self.env = Environment()
        self.link = Link(self.env, speed)
        self.sending: dict[str, Process] = {}
        self.arrived: dict[str, float] = {}

    def send(self, when: float, name: str, tokens: int) -> None:
        def transfer() -> Generator[Event, object, None]:
            yield self.env.at(when, Priority.LATE)
            try:
                yield from self.link.send(tokens)
            except simpy.Interrupt:
                return
            del self.sending[name]
            yield self.link.arrival()
            self.arrived[name] = self.env.now

        self.sending[name] = self.env.process(transfer())

    def interrupt(self, when: float, *names: str, interrupted: tuple[str, ...]) -> None:
        """Interrupt those of the named transfers that are still sending; check which these are."""

        def outage() -> Generator[Event, object, None]:
            yield self.env.at(when, Priority.OUTAGE)
            sending = [name for name in names if name in self.sending]
            assert tuple(sending) == interrupted
            for name in sending:
                self.sending.pop(name).interrupt()

        self.env.process(outage())


def test_one_after_the_other() -> None:
    bench = Bench()
    for when, name, tokens in ((0.0, "a", 10), (0.5, "b", 20), (5.0, "c", 10)):
        bench.send(when, name, tokens)
    bench.env.run()
    assert bench.arrived == {"a": 1.25, "b": 3.25, "c": 6.25}
    link = bench.link
    assert (link.busy, link.moved, link.sent, link.waited) == (4.0, 400.0, 3, 0.5)


def test_those_behind_an_interrupted_transfer_move_up() -> None:
    """Half of a has been sent when it and d, which waits, are interrupted; b starts at once, c after it."""
    bench = Bench()
    for name, tokens in (("a", 10), ("b", 20), ("d", 30), ("c", 10)):
        bench.send(0.0, name, tokens)
    bench.interrupt(0.5, "a", "d", interrupted=("a", "d"))
    bench.env.run()
    assert bench.arrived == {"b": 2.75, "c": 3.75}
    link = bench.link
    assert (link.busy, link.moved, link.sent, link.waited) == (3.5, 350.0, 2, 0.5 + 2.5)


def test_a_waiting_transfer_is_interrupted_and_the_running_one_goes_on() -> None:
    bench = Bench()
    for name, tokens in (("a", 10), ("b", 20), ("c", 10)):
        bench.send(0.0, name, tokens)
    bench.interrupt(0.5, "b", interrupted=("b",))
    bench.env.run()
    assert bench.arrived == {"a": 1.25, "c": 2.25}


@pytest.mark.parametrize(("when", "interrupted"), [(0.75, ("a",)), (1.0, ()), (1.125, ())])
def test_a_cache_that_was_sent_whole_arrives(when: float, interrupted: tuple[str, ...]) -> None:
    bench = Bench()
    bench.send(0.0, "a", 10)
    bench.interrupt(when, "a", interrupted=interrupted)
    bench.env.run()
    assert bench.arrived == ({} if interrupted else {"a": 1.25})


def test_a_link_is_free_after_an_interrupt() -> None:
    bench = Bench()
    bench.send(0.0, "a", 100)
    bench.interrupt(0.5, "a", interrupted=("a",))
    bench.send(0.75, "b", 10)
    bench.env.run()
    assert bench.arrived == {"b": 2.0}


def test_caches_without_bytes() -> None:
    bench = Bench(LinkSpeed(bandwidth=100.0, latency=0.25, bytes_per_token=0.0))
    bench.send(0.0, "a", 10)
    bench.send(0.0, "b", 10)
    bench.interrupt(0.125, "a", "b", interrupted=())
    bench.env.run()
    assert bench.arrived == {"a": 0.25, "b": 0.25}
