"""Limits on requests and on how long clients may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits on requests and their clients.

    Attributes:
        body_bytes: size of a request's body.
        requests: HTTP requests that are answered at once, counted from the end of their bodies.
        queue: waiting generations, beyond those that can run at once.
        header_seconds: time for a request's line and headers.
        body_seconds: time for a request's body.
        write_seconds: time in which a client must read 64 KiB of its response, or what is left of it.
    """

    body_bytes: int = 4 << 20
    requests: int = 1024
    queue: int = 2048
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 10.0
