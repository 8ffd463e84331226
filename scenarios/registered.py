"""Scenario fields whose allowed values are the names in a registry."""

from __future__ import annotations

from typing import Any

from pydantic import AfterValidator

from schedulers.registry import Registry
from workloads.errors import BadInput


def registered(registry: Registry[Any], *besides: str) -> AfterValidator:
    """Marks a text field as the name of an entry, or one of `besides`: `Annotated[str, registered(ROUTERS)]`."""

    def check(name: str) -> str:
        if name not in registry and name not in besides:
            raise BadInput(f"expected one of {', '.join((*besides, *registry))}", value=name)
        return name

    return AfterValidator(check)
