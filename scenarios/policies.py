"""Fields that name a policy: an entry of a registry, alone or in a section with its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import AfterValidator, ConfigDict

from latency_models.io.config_io import Strict
from schedulers.registry import Registry
from workloads.errors import BadInput

_Policy = TypeVar("_Policy")


class PolicySpec(Strict):
    """A section with a policy's name and its parameters, of which a plug-in's policy may have others."""

    model_config = ConfigDict(extra="allow")

    policy: str

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that the section states, by name."""
        stated = {name: value for name, value in self if name != "policy" and value is not None}
        return stated | (self.model_extra or {})


def registered(registry: Registry[Any], *more_names: str) -> AfterValidator:
    """Marks a text field as the name of an entry, or one of `more_names`: `Annotated[str, registered(ROUTERS)]`."""

    def check(name: str) -> str:
        if name not in registry and name not in more_names:
            raise BadInput(f"expected one of {', '.join((*more_names, *registry))}", value=name)
        return name

    return AfterValidator(check)


def name_or_section(registry: Registry[Callable[..., Any]], *arguments: object) -> AfterValidator:
    """Marks a field as a policy's name or section, whose parameters are checked by a policy made with `arguments`."""

    def check(policy: str | PolicySpec) -> str | PolicySpec:
        if not isinstance(policy, str):
            make_policy(registry, *named(policy), *arguments)
        elif policy not in registry:
            raise BadInput(f"expected one of {', '.join(registry)}", value=policy)
        return policy

    return AfterValidator(check)


def named(policy: str | PolicySpec) -> tuple[str, dict[str, Any]]:
    """The name and the parameters of a policy."""
    return (policy, {}) if isinstance(policy, str) else (policy.policy, policy.parameters)


def make_policy(
    registry: Registry[Callable[..., _Policy]], name: str, parameters: Mapping[str, Any], *arguments: object,
    field: str | None = None,
) -> _Policy:  # fmt: skip
    """A new policy, made with `arguments` and its parameters."""
    try:
        return registry.select(name)(*arguments, **parameters)
    except (TypeError, ValueError) as error:
        raise BadInput(f"expected parameters of {name}: {error}", field=field) from None
