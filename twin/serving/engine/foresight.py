"""Foresight: until when no request comes to an engine, so that it may visit step ends before their time.

An engine touches a few hundred places in memory at a step end. With many engines these are no longer in the processor's
caches when its next step end comes, and each visit waits for memory. An engine that is not about to be chosen therefore
visits its next step ends at once, as long as nothing outside can tell: no request comes to it before, none of its
requests finishes, so its load stays what it is, and the router does not look at its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

RequestsElsewhere = Callable[[int, int], int]
"""See `schedulers.routing.ForeseesChoices.requests_elsewhere`."""


class Arrivals(Protocol):
    """The coming requests."""

    def time_after(self, requests: int) -> float:
        """A time, in seconds, before which at most `requests` more requests arrive; infinity after the last."""
        ...


class Foresight:
    """The knowledge that one engine of a pool has of the coming requests.

    Args:
        requests_elsewhere: of the pool's router. position, size: of the engine in the pool, and of the pool.
    """

    def __init__(self, arrivals: Arrivals, requests_elsewhere: RequestsElsewhere, position: int, size: int) -> None:
        self._arrivals = arrivals
        self._requests_elsewhere = requests_elsewhere
        self._position = position
        self._size = size

    def no_request_before(self) -> float:
        """A time, in seconds, before which no request comes to the engine, if none of its own finishes."""
        requests_elsewhere = self._requests_elsewhere  # Python 3.11 is slow to call an instance's attribute
        return self._arrivals.time_after(requests_elsewhere(self._position, self._size))
