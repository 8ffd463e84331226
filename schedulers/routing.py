"""Routers: which engine gets a request."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from math import inf
from operator import attrgetter
from typing import Any, ClassVar, Final, Protocol, TypeVar

from schedulers.router_views import LoadTree
from workloads.registry import Registry
from workloads.request import Request

Draw = Callable[[int], int]
"""A source of randomness: given n, a whole number from 0 to n - 1."""


class EngineState(Protocol):
    """The part of an engine that a router sees. Each answer is computed when it is asked for."""

    @property
    def index(self) -> int:
        """A number of its own, which stays the same when other engines fail."""

    @property
    def load(self) -> int:
        """Prompt tokens plus `max_tokens` of its unfinished requests (`EngineCore.outstanding_tokens`)."""

    @property
    def speed(self) -> float:
        """Tokens of load that it works off a second when it is full, or a number in proportion to that."""

    @property
    def num_running(self) -> int:
        """Requests that are admitted and unfinished, as of the last step begun."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that no sequence holds, as of the last step begun."""

    def cached_prefix_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a request that are in its prefix cache, lower tiers included.

        That is as of the last step begun, or as of the cache events that have come (`schedulers.router_views`).
        """


Engine = TypeVar("Engine", bound=EngineState)

_load = attrgetter("load")

_BITS: Final = (1 << 64) - 1


class Router(Protocol):
    """Chooses an engine for each request.

    A class may say by `DRAWS = False` that it never draws, so that replications which differ in nothing else are one
    run, and by `READS_CACHES = False` that it never asks for `cached_prefix_tokens`, so that engines in other processes
    need not send cache events. Both are true of a router that does not say (`draws`, `reads_caches`).
    """

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        """One of `engines`: those that are up, at least one, always in the same order."""


def draws(name: str) -> bool:
    """Tell whether the router of this name may draw random numbers."""
    return bool(getattr(ROUTERS.select(name), "DRAWS", True))


def reads_caches(name: str) -> bool:
    """Tell whether the router of this name may ask for cached prefixes."""
    return bool(getattr(ROUTERS.select(name), "READS_CACHES", True))


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


class ForeseesChoices(Router, Protocol):
    """A router that chooses by loads alone, or by nothing, and can tell which engines are not about to be chosen."""

    def requests_elsewhere(self, position: int, size: int) -> int:
        """The least number of the next requests that go to other engines than that at `position` of `size`.

        That must hold whatever the loads of the others become, while the load of this engine does not sink.
        """


class TakesTurns(Router, Protocol):
    """A router that chooses by the number of a request alone, so that engines do not depend on each other."""

    def turn_of(self, number: int, size: int) -> int:
        """The position among `size` engines, all of them up, of the engine that gets request `number` (from 0)."""


class _InTurns:
    """Chooses by a cost; engines take turns among equals, so that idle ones are used evenly."""

    DRAWS: ClassVar[bool] = False
    READS_CACHES: ClassVar[bool] = False

    def __init__(self, draw: Draw | None = None) -> None:
        self._turn = 0

    def _start(self, size: int) -> int:
        start = self._turn % size
        self._turn += 1
        return start

    def _cheapest(self, engines: Many[Engine], cost: Callable[[EngineState], float]) -> Engine:
        start = self._start(len(engines))
        return min((*engines[start:], *engines[:start]), key=cost)


class RoundRobin(_InTurns):
    """Engines in turn."""

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        return engines[self._start(len(engines))]

    def requests_elsewhere(self, position: int, size: int) -> int:
        return (position - self._turn) % size

    def turn_of(self, number: int, size: int) -> int:
        return number % size


class LeastLoaded(_InTurns):
    """The engine with the smallest load."""

    def __init__(self, draw: Draw | None = None) -> None:
        super().__init__()
        self._loads: LoadTree | None = None

    def follow(self, engines: Many[EngineState]) -> LoadTree:
        self._loads = LoadTree([engine.load for engine in engines])
        return self._loads

    def requests_elsewhere(self, position: int, size: int) -> int:
        """See `ForeseesChoices.requests_elsewhere`: each engine with less load has to be chosen at least once."""
        return 0 if self._loads is None else self._loads.num_below(position)

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        if len(engines) == 1:
            return engines[0]
        if self._loads is None:
            return self._cheapest(engines, _load)
        return engines[self._loads.first_least(self._start(len(engines)))]


class WeightedLeastLoaded(_InTurns):
    """The engine with the least load for its speed, for engines that differ."""

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        return self._cheapest(engines, lambda engine: engine.load / engine.speed)


class ShortestExpectedDelay(_InTurns):
    """The engine that is first to have worked off its load and the request, by its speed.

    An idle slow engine gets no request that a fast one would finish sooner behind others, unlike with the least load
    for the speed (Banawan and Zahorjan 1989; `sed` beside `wlc` in the Linux virtual server).
    """

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        tokens = request.prompt_tokens + request.max_tokens
        return self._cheapest(engines, lambda engine: (engine.load + tokens) / engine.speed)


class WeightedRandom:
    """An engine drawn at random, with a probability in proportion to its speed."""

    READS_CACHES: ClassVar[bool] = False

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        remainder = 0.0
        for engine in engines:
            remainder += engine.speed
        remainder *= self._draw(1 << 53) / (1 << 53)
        for engine in engines:
            remainder -= engine.speed
            if remainder < 0:
                return engine
        return engines[-1]


class PowerOfTwo:
    """The less loaded of two engines drawn at random (Mitzenmacher 2001)."""

    READS_CACHES: ClassVar[bool] = False

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        if len(engines) == 1:
            return engines[0]
        first = self._draw(len(engines))
        second = (first + 1 + self._draw(len(engines) - 1)) % len(engines)
        return min(engines[first], engines[second], key=_load)


class PrefixAware(_InTurns):
    """The engine with the least load after the discount for the prefix that it has cached.

    The cost of an engine is its load less `weight` times the cached prefix, both in tokens. A weight of 0 chooses by
    load alone, a large one by the longest prefix. NVIDIA Dynamo's KV router has the same cost, in blocks.
    """

    READS_CACHES: ClassVar[bool] = True

    def __init__(self, draw: Draw, weight: float = 1.0) -> None:
        super().__init__()
        _check_least("weight", weight, 0)
        self._weight = weight

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        if len(engines) == 1:
            return engines[0]
        weight = self._weight
        return self._cheapest(engines, lambda engine: engine.load - weight * engine.cached_prefix_tokens(request))


class SessionAffinity:
    """The engine that had the session's earlier requests; the least loaded for the first, and without a session.

    A session moves to the least loaded engine for good when its own is down, or has more than `load_factor` times the
    mean load. The `max_sessions` sessions that were heard of last are remembered.
    """

    DRAWS: ClassVar[bool] = False
    READS_CACHES: ClassVar[bool] = False

    def __init__(self, draw: Draw, load_factor: float = inf, max_sessions: int = 1_000_000) -> None:
        _check_least("load_factor", load_factor, 1)
        _check_least("max_sessions", max_sessions, 1)
        self._load_factor = load_factor
        self._max_sessions = max_sessions
        self._least_loaded = LeastLoaded()
        self._engine_of: OrderedDict[int, int] = OrderedDict()

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        session = request.session
        if session < 0:
            return self._least_loaded.choose(request, engines)
        index = self._engine_of.get(session, -1)
        for engine in engines:
            if engine.index == index and engine.load <= _bounded_load(engines, self._load_factor):
                self._engine_of.move_to_end(session)
                return engine
        target = self._least_loaded.choose(request, engines)
        self._engine_of[session] = target.index
        self._engine_of.move_to_end(session)
        if len(self._engine_of) > self._max_sessions:
            self._engine_of.popitem(last=False)
        return target


class ConsistentHashing:
    """The engine at the next place of a ring of hashes, if its load is at most `load_factor` times the mean.

    Otherwise the next one on the ring ("Consistent hashing with bounded loads", Mirrokni, Thorup, Zadimoghaddam 2018).
    Each engine has `virtual_nodes` places. The key is the session, else the first prefix block, else the request.
    """

    DRAWS: ClassVar[bool] = False
    READS_CACHES: ClassVar[bool] = False

    def __init__(self, draw: Draw, load_factor: float = 1.25, virtual_nodes: int = 128) -> None:
        _check_least("load_factor", load_factor, 1)
        _check_least("virtual_nodes", virtual_nodes, 1)
        self._load_factor = load_factor
        self._virtual_nodes = virtual_nodes
        self._indices: list[int] = []
        self._points: list[int] = []
        self._owners: list[int] = []

    def choose(self, request: Request, engines: Many[Engine]) -> Engine:
        if len(engines) == 1:
            return engines[0]
        indices = [engine.index for engine in engines]
        if indices != self._indices:
            self._make_ring(indices)
        limit = _bounded_load(engines, self._load_factor)
        owners, size = self._owners, len(self._points)
        place = bisect_left(self._points, _spread(hash((routing_key(request), -3))))
        for i in range(size):
            engine = engines[owners[(place + i) % size]]
            if engine.load <= limit:
                return engine
        raise AssertionError(f"no engine has at most {limit} tokens, though the mean is below")

    def _make_ring(self, indices: list[int]) -> None:
        """Place engines on the ring. The places of an engine do not depend on the other engines."""
        places = sorted(
            (_spread(hash((index, place))), position)
            for position, index in enumerate(indices)
            for place in range(self._virtual_nodes)
        )
        self._indices = indices
        self._points = [point for point, _ in places]
        self._owners = [position for _, position in places]


def routing_key(request: Request) -> int:
    """The key of requests that belong together: the session, else the first block of the prompt."""
    if request.session >= 0:
        return request.session
    return request.prefix_blocks[0] if request.prefix_blocks else request.id


def _spread(number: int) -> int:
    """A number of 64 bits, each of which depends on all bits of `number` (the finaliser of splitmix64)."""
    number &= _BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _BITS
    return number ^ (number >> 31)


def _bounded_load(engines: Many[EngineState], load_factor: float) -> float:
    """`load_factor` times the mean load; at least one engine has at most so much."""
    if load_factor == inf:
        return inf
    return load_factor * sum(engine.load for engine in engines) / len(engines)


def _check_least(name: str, value: float, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value:g}")


ROUTERS: Registry[Callable[..., Router]] = Registry(
    least_loaded=LeastLoaded,
    power_of_two=PowerOfTwo,
    round_robin=RoundRobin,
    prefix_aware=PrefixAware,
    session_affinity=SessionAffinity,
    consistent_hashing=ConsistentHashing,
    weighted_least_loaded=WeightedLeastLoaded,
    shortest_expected_delay=ShortestExpectedDelay,
    weighted_random=WeightedRandom,
)
"""Makes a router, given a source of randomness and its parameters by name, if it has some.

Each pool of engines has a router of its own.
"""
