"""Admission control of an engine, `engine.admission_control`, and clients that try again, `workload.retries`."""

from __future__ import annotations

import math

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from latency_models.io.config_io import Strict
from schedulers.admission_control import AdmissionLimits, WaitingLimits


class ClassLimitsSpec(Strict):
    """The most requests and prompt tokens of a class that may wait for their first step. Default: any number."""

    max_waiting: PositiveInt | None = None
    max_waiting_tokens: PositiveInt | None = None

    @property
    def limits(self) -> WaitingLimits:
        """The scheduler's settings."""
        return WaitingLimits(self.max_waiting or 0, self.max_waiting_tokens or 0)


class AdmissionControlSpec(Strict):
    """The requests that an engine sheds. All limits are for one engine.

    Attributes:
        max_waiting, max_waiting_tokens: the most requests, and prompt tokens, that may wait for their first step.
        max_waiting_per_tenant: the most requests of one tenant. classes: limits of classes by name.
        predicted_ttft: a request is shed if its predicted TTFT exceeds so many times the goal of its class.
    """

    max_waiting: PositiveInt | None = None
    max_waiting_tokens: PositiveInt | None = None
    max_waiting_per_tenant: PositiveInt | None = None
    predicted_ttft: PositiveFloat | None = None
    classes: dict[str, ClassLimitsSpec] = Field(default_factory=dict)

    def build(self) -> AdmissionLimits:
        """The scheduler's settings."""
        return AdmissionLimits(
            WaitingLimits(self.max_waiting or 0, self.max_waiting_tokens or 0),
            tuple((name, spec.limits) for name, spec in self.classes.items()),
            self.max_waiting_per_tenant or 0,
            math.inf if self.predicted_ttft is None else self.predicted_ttft,
        )


class RetriesSpec(Strict):
    """Clients send a shed request again, `attempts` times at most.

    They wait for as long as `Retry-After` says, times a number drawn evenly between 1 and 1 + `jitter`.
    """

    attempts: PositiveInt
    jitter: NonNegativeFloat = 0.5
