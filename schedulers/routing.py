"""Routers: which engine gets a request."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from schedulers.load_tree import LoadTree
from schedulers.registry import Registry

if TYPE_CHECKING:
    from workloads.request import Request

Draw = Callable[[int], int]
"""A source of randomness: given n, a whole number from 0 to n - 1."""


class EngineState(Protocol):
    """The part of an engine that a router sees. Each answer is computed when it is asked for."""

    @property
    def load(self) -> int:
        """Prompt tokens plus `max_tokens` of its unfinished requests (`EngineCore.outstanding_tokens`)."""
        ...

    @property
    def free_blocks(self) -> int:
        """KV blocks that no sequence holds, as of the last step begun."""
        ...

    def cached_prefix_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a request that are in its prefix cache, as of the last step begun."""
        ...


Engine = TypeVar("Engine", bound=EngineState)

_load = attrgetter("load")


class Router(Protocol):
    """Chooses an engine for each request."""

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        """One of `engines`: those that are up, at least one, always in the same order."""
        ...


def own_method(router: Router, name: str) -> Callable[..., Any] | None:
    """A method that the router's own class defines, or None.

    One that it inherits speaks of the choices of another class.
    """
    method: Callable[..., Any] | None = getattr(router, name) if name in vars(type(router)) else None
    return method


class FollowsLoads(Router, Protocol):
    """A router that need not look at every engine for each request, if it is told of every change of their loads."""

    def follow(self, engines: Many[EngineState]) -> LoadTree:
        """The loads by which it chooses among `engines` from now on: the caller sets each as it changes.

        To be called again when the engines are others. A router that was never called so looks at the engines.
        """
        ...


class ForeseesChoices(Router, Protocol):
    """A router that chooses by loads alone, or by nothing, and can tell which engines are not about to be chosen."""

    def requests_elsewhere(self, position: int, size: int) -> int:
        """The least number of the next requests that go to other engines than that at `position` of `size`.

        That must hold whatever the loads of the others become, while the load of this engine does not sink.
        """
        ...


class TakesTurns(Router, Protocol):
    """A router that chooses by the number of a request alone, so that engines do not depend on each other."""

    def turn_of(self, number: int, size: int) -> int:
        """The position among `size` engines, all of them up, of the engine that gets request `number` (from 0)."""
        ...


class RoundRobin:
    """Engines in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        """See `Router.choose`."""
        chosen = engines[self._turn % len(engines)]
        self._turn += 1
        return chosen

    def requests_elsewhere(self, position: int, size: int) -> int:
        """See `ForeseesChoices.requests_elsewhere`."""
        return (position - self._turn) % size

    def turn_of(self, number: int, size: int) -> int:
        """See `TakesTurns.turn_of`."""
        return number % size


class LeastLoaded:
    """The engine with the smallest load. Engines take turns among equals, so that idle ones are used evenly."""

    def __init__(self) -> None:
        self._turn = 0
        self._loads: LoadTree | None = None

    def follow(self, engines: Many[EngineState]) -> LoadTree:
        """See `FollowsLoads.follow`."""
        self._loads = LoadTree([engine.load for engine in engines])
        return self._loads

    def requests_elsewhere(self, position: int, size: int) -> int:
        """See `ForeseesChoices.requests_elsewhere`: each engine with less load has to be chosen at least once."""
        return 0 if self._loads is None else self._loads.num_below(position)

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        """See `Router.choose`."""
        if len(engines) == 1:
            return engines[0]
        start = self._turn % len(engines)
        self._turn += 1
        if self._loads is not None:
            return engines[self._loads.first_least(start)]
        return min((*engines[start:], *engines[:start]), key=_load)


class PowerOfTwo:
    """The less loaded of two engines drawn at random (Mitzenmacher 2001)."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        """See `Router.choose`."""
        if len(engines) == 1:
            return engines[0]
        first = self._draw(len(engines))
        second = (first + 1 + self._draw(len(engines) - 1)) % len(engines)
        return min(engines[first], engines[second], key=_load)


ROUTERS: Registry[Callable[[Draw], Router]] = Registry(
    least_loaded=lambda draw: LeastLoaded(),
    power_of_two=PowerOfTwo,
    round_robin=lambda draw: RoundRobin(),
)
"""Makes a router, given a source of randomness. Each pool of engines has a router of its own."""
