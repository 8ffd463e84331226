"""A link by hand: who goes when, and what breaking off does to those behind."""

from __future__ import annotations

import pytest

from twin.clock import Clock
from twin.serving.engine import LATE_RANK
from twin.serving.link import Link, LinkSpeed, Transfer

SPEED = LinkSpeed(bandwidth=100.0, latency=0.25, bytes_per_token=10.0)  # ten tokens a second


class Bench:
    """A link, what was sent over it, and when it arrived."""

    def __init__(self, speed: LinkSpeed = SPEED) -> None:
        self.clock = Clock()
        self.link = Link(self.clock, speed)
        self.sent: dict[str, Transfer] = {}
        self.came: dict[str, float] = {}

    def send(self, when: float, name: str, tokens: int) -> None:
        def arrived() -> None:
            assert name not in self.came
            self.came[name] = self.clock.now

        def go(number: int) -> None:
            self.sent[name] = self.link.send(tokens, arrived)

        self.clock.call(when, LATE_RANK, go)

    def break_off(self, when: float, *names: str, broken: tuple[str, ...]) -> None:
        def go(number: int) -> None:
            lost = [self.sent[name] for name in names]
            assert self.link.break_off(lost) == {self.sent[name] for name in broken}

        self.clock.call(when, 1, go)


def test_one_after_the_other() -> None:
    bench = Bench()
    for when, name, tokens in ((0.0, "a", 10), (0.5, "b", 20), (5.0, "c", 10)):
        bench.send(when, name, tokens)
    bench.clock.run()
    assert bench.came == {"a": 1.25, "b": 3.25, "c": 6.25}
    link = bench.link
    assert (link.busy, link.moved, link.sent, link.waited) == (4.0, 400.0, 3, 0.5)


def test_whoever_stands_behind_moves_up() -> None:
    """Half of a has gone when it is broken off with d, which stood in line; b goes at once, c after it."""
    bench = Bench()
    for name, tokens in (("a", 10), ("b", 20), ("d", 30), ("c", 10)):
        bench.send(0.0, name, tokens)
    bench.break_off(0.5, "a", "d", broken=("a", "d"))
    bench.clock.run()
    assert bench.came == {"b": 2.75, "c": 3.75}
    link = bench.link
    assert (link.busy, link.moved, link.sent, link.waited) == (3.5, 350.0, 2, 0.5 + 2.5)


def test_what_is_under_way_goes_on() -> None:
    bench = Bench()
    for name, tokens in (("a", 10), ("b", 20), ("c", 10)):
        bench.send(0.0, name, tokens)
    bench.break_off(0.5, "b", broken=("b",))
    bench.clock.run()
    assert bench.came == {"a": 1.25, "c": 2.25}


@pytest.mark.parametrize(("when", "broken"), [(0.75, ("a",)), (1.0, ()), (1.125, ())])
def test_what_has_gone_whole_arrives(when: float, broken: tuple[str, ...]) -> None:
    bench = Bench()
    bench.send(0.0, "a", 10)
    bench.break_off(when, "a", broken=broken)
    bench.clock.run()
    assert bench.came == ({} if broken else {"a": 1.25})


def test_a_link_that_broke_off_is_free() -> None:
    bench = Bench()
    bench.send(0.0, "a", 100)
    bench.break_off(0.5, "a", broken=("a",))
    bench.send(0.75, "b", 10)
    bench.clock.run()
    assert bench.came == {"b": 2.0}


def test_caches_without_bytes() -> None:
    bench = Bench(LinkSpeed(bandwidth=100.0, latency=0.25, bytes_per_token=0.0))
    bench.send(0.0, "a", 10)
    bench.send(0.0, "b", 10)
    bench.break_off(0.125, "a", "b", broken=())
    bench.clock.run()
    assert bench.came == {"a": 0.25, "b": 0.25}
