"""The order of waiting requests, `engine.scheduling_policy`, and the classes whose goals it may follow."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, PositiveFloat

from latency_models.io.config_io import Strict
from scenarios.registered import registered
from schedulers.waiting_queue import SCHEDULING_POLICIES
from workloads.errors import BadInput


class SchedulingSpec(Strict):
    """A scheduling policy with parameters; the fields that are left out have the policy's own defaults.

    Attributes:
        policy: its name. prompt_weight, output_weight: service of a token (fair). weights: of tenants by name (fair). A
            plug-in's policy may have others.
    """

    model_config = ConfigDict(extra="allow")

    policy: Annotated[str, registered(SCHEDULING_POLICIES)]
    prompt_weight: PositiveFloat | None = None
    output_weight: PositiveFloat | None = None
    weights: dict[str, PositiveFloat] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that were given, by name."""
        given = {name: value for name, value in self if name != "policy" and value is not None}
        return given | (self.model_extra or {})


def _check(scheduling: str | SchedulingSpec) -> str | SchedulingSpec:
    if isinstance(scheduling, str):
        if scheduling not in SCHEDULING_POLICIES:
            raise BadInput(f"expected one of {', '.join(SCHEDULING_POLICIES)}", value=scheduling)
    else:
        try:
            SCHEDULING_POLICIES.select(scheduling.policy)(**scheduling.parameters)
        except (TypeError, ValueError) as error:
            raise BadInput(f"expected parameters of {scheduling.policy}: {error}") from None
    return scheduling


Scheduling = Annotated[str | SchedulingSpec, AfterValidator(_check)]
"""The name of a scheduling policy, or a section with its name and parameters."""


def scheduling_settings(scheduling: str | SchedulingSpec) -> dict[str, Any]:
    """The fields of `EngineConfig` for a scheduling policy."""
    if isinstance(scheduling, str):
        return {"scheduling_policy": scheduling}
    return {"scheduling_policy": scheduling.policy, "scheduling_parameters": scheduling.parameters}


class ServiceClassSpec(Strict):
    """The contract of a class of requests: its place in the order, and its goals in seconds."""

    priority: int = 0
    ttft: PositiveFloat | None = None
    tpot: PositiveFloat | None = None
    e2e: PositiveFloat | None = None

    @property
    def goals(self) -> dict[str, float]:
        """The goals that were given, by the name of the latency."""
        return {name: limit for name in ("ttft", "tpot", "e2e") if (limit := getattr(self, name)) is not None}
