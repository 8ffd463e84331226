"""Generations as the event loop sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from live.generation import Generation
from live.server.errors import ApiError

Reason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""How a generation ended."""


class Ticket:
    """One generation.

    Attributes:
        generation: the engine's while it runs. over: no more tokens will come. failure: what went wrong.
        arrived, first, latest: seconds of `time.perf_counter`: of the request, its first and its latest token.
        ring: tells whoever waits that there is news of it.
    """

    __slots__ = ("arrived", "failure", "first", "generation", "latest", "over", "ring")

    def __init__(self, generation: Generation, arrived: float, ring: Callable[[], None]) -> None:
        self.generation, self.arrived, self.ring = generation, arrived, ring
        self.over = False
        self.failure: ApiError | None = None
        self.first = self.latest = -1.0
