"""The settings of a server: its address, its limits and its service classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True)
class Limits:
    """Limits on requests and their clients.

    Attributes:
        body_bytes: size of a request's body.
        requests: HTTP requests that are answered at once, counted from the end of their bodies.
        queue: waiting generations, beyond those that can run at once.
        header_seconds: time for a request's line and headers.
        body_seconds: time for a request's body.
        write_seconds: time in which a client must read 64 KiB of its response, or the rest if that is less.
    """

    body_bytes: int = 4 << 20
    requests: int = 1024
    queue: int = 2048
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    write_seconds: float = 10.0


@dataclass(frozen=True)
class ServiceClass:
    """A class that requests may name: its priority, and its goal for the first token, seconds."""

    priority: int = 0
    ttft_goal: float = inf


@dataclass(frozen=True)
class ServerConfig:
    """The settings of a server, apart from its model and engine.

    Attributes:
        name: the model's name for clients. port: 0 takes a free one. api_key: "" for none.
        drain_seconds: grace period for running requests at shutdown.
        classes: service classes that requests may name, by name.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0
    classes: Mapping[str, ServiceClass] = field(default_factory=dict)
