"""Kinds of requests beside one another: `workload.tasks`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from scenarios.lengths import LengthSpec
from scenarios.scheduling import ServiceClassSpec
from workloads.mixes import TaskShare
from workloads.pairs import Independent


class TaskSpec(Strict):
    """A kind of request: its share by `weight`, its prompts, and its answers where it has any.

    Attributes:
        priority: smaller goes first; with a `service_class`, that of the class. tenant: whose requests these are.
    """

    task: Literal["generate", "classify", "embed", "score", "rerank", "prompt_logprobs"]
    weight: PositiveFloat
    prefill: LengthSpec
    decode: LengthSpec | None = None
    priority: int = 0
    service_class: str | None = None
    tenant: str = ""

    @model_validator(mode="after")
    def _answers(self) -> TaskSpec:
        if (self.task == "generate") != (self.decode is not None):
            raise ValueError("expected decode, the lengths of answers, for the task generate and for no other")
        return self

    def build(self, classes: Mapping[str, ServiceClassSpec]) -> TaskShare:
        """The share of a mix, given the classes by name."""
        prompts = self.prefill.build()
        lengths = Independent(prompts, self.decode.build()) if self.decode else prompts
        if self.service_class is None:
            return TaskShare(self.task, self.weight, lengths, self.priority, self.tenant)
        spec = classes[self.service_class]
        goal = math.inf if spec.ttft is None else spec.ttft
        return TaskShare(self.task, self.weight, lengths, spec.priority, self.tenant, self.service_class, goal)
