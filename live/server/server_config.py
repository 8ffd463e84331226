"""The settings of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from live.server.contracts import ServiceClass
from live.server.limits import Limits


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
