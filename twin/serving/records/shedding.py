"""Requests that engines shed: clients that try again, and a log of those that give up."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from twin.serving.records.requests import RequestRecord


class ShedLog:
    """The requests that were shed for good.

    Attributes:
        arrival, ended, client: of each: when it was sent first and shed last, seconds, and its class and tenant as an
            index into `clients`. retries: requests sent again. reasons: refusals by the limit that was reached.
    """

    def __init__(self, clients: Iterable[tuple[str, str]]) -> None:
        self.arrival = array("d")
        self.ended = array("d")
        self.client = array("i")
        self.clients = {client: i for i, client in enumerate(clients)}
        self.retries = 0
        self.reasons: Counter[str] = Counter()

    def add(self, record: RequestRecord, now: float) -> None:
        """Add a request whose client gives up."""
        request = record.request
        self.arrival.append(request.arrival)
        self.ended.append(now)
        self.client.append(self.clients.get((request.service_class, request.tenant), 0))


class Retries:
    """Decides when a client sends a shed request again.

    Args:
        attempts: of one request, besides the first; 0 for none. jitter: the wait is drawn evenly between what the
            engine says and (1 + jitter) times that.
    """

    def __init__(self, attempts: int, jitter: float, rng: np.random.Generator) -> None:
        self.attempts = attempts
        self.jitter = jitter
        self._rng = rng

    def wait(self, record: RequestRecord, retry_after: float) -> float | None:
        """Seconds until the request is sent again, which is counted; None if the client gives up."""
        if record.retries >= self.attempts:
            return None
        record.retries += 1
        return retry_after * (1 + self.jitter * float(self._rng.random()))
