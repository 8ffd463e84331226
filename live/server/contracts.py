"""The contract of a request: its tenant, its class and what the class promises, from headers and body."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from live.server.asgi import HttpExchange
from live.server.errors import bad_request

CLASS_HEADER, TENANT_HEADER = b"x-request-class", b"x-tenant"

MAX_TENANT = 128
"""Characters of a tenant's name."""


@dataclass(frozen=True)
class ServiceClass:
    """A class that the server knows: its priority, and its goal for the first token, seconds."""

    priority: int = 0
    ttft_goal: float = inf


@dataclass(frozen=True)
class Contract:
    """The part of a request that a scheduler knows besides its tokens; see `workloads.request.Request`.

    Attributes:
        arrival: seconds of the engine's clock.
    """

    tenant: str = ""
    service_class: str = ""
    priority: int = 0
    ttft_goal: float = inf
    arrival: float = field(default_factory=time.perf_counter)


def read_contract(exchange: HttpExchange, priority: int | None, classes: Mapping[str, ServiceClass]) -> Contract:
    """The contract of a request.

    Args:
        priority: of the body, which goes before that of the class. classes: those that the server knows; without any
            the class's header is ignored.

    Raises:
        ApiError: 400 for a class that the server does not know, and for a tenant of too many characters.
    """
    tenant, name = exchange.header(TENANT_HEADER), exchange.header(CLASS_HEADER)
    if len(tenant) > MAX_TENANT:
        raise bad_request(None, f"header X-Tenant: expected at most {MAX_TENANT} characters, found {len(tenant)}")
    if name and classes and name not in classes:
        expected = f"expected one of {', '.join(classes)}"
        raise bad_request(None, f"header X-Request-Class: {expected}, found {name[:MAX_TENANT]}")
    service_class = classes.get(name)
    if service_class is None:
        return Contract(tenant, priority=priority or 0)
    return Contract(tenant, name, service_class.priority if priority is None else priority, service_class.ttft_goal)
