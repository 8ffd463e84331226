"""Which engine gets a request. A router sees loads, not engines, and draws nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

Draw = Callable[[int], int]
"""A source of randomness that is handed in: given n, a whole number from 0 to n - 1."""

Loads = Callable[[int], int]
"""Given an engine's position, the tokens of its unfinished requests (`EngineCore.load`). Asked only where it
matters."""


class Router(Protocol):
    """Chooses among the engines that are up."""

    def choose(self, engines: Many[int], loads: Loads) -> int:
        """One of `engines` (positions, at least one)."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, engines: Many[int], loads: Loads) -> int:
        """As `Router.choose`."""
        chosen = engines[self._turn % len(engines)]
        self._turn += 1
        return chosen


class LeastLoaded:
    """The fewest tokens; among equals the one whose turn it is, so that an idle pool is used evenly."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, engines: Many[int], loads: Loads) -> int:
        """As `Router.choose`."""
        if len(engines) == 1:
            return engines[0]
        start = self._turn % len(engines)
        self._turn += 1
        return min((*engines[start:], *engines[:start]), key=loads)


class PowerOfTwo:
    """The less loaded of two engines drawn at random (Mitzenmacher 2001)."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, engines: Many[int], loads: Loads) -> int:
        """As `Router.choose`."""
        if len(engines) == 1:
            return engines[0]
        first = self._draw(len(engines))
        second = (first + 1 + self._draw(len(engines) - 1)) % len(engines)
        return min(engines[first], engines[second], key=loads)


def router(name: str, draw: Draw) -> Router:
    """A router by its name: round_robin, least_loaded or power_of_two.

    Raises:
        ValueError: another name.
    """
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "power_of_two":
            return PowerOfTwo(draw)
    raise ValueError(f"expected round_robin, least_loaded or power_of_two, found {name!r}")
