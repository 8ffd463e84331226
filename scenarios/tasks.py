"""Kinds of requests beside one another: `workload.tasks`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveFloat, model_validator

from latency_models.io.config_io import Strict
from scenarios.lengths import LengthSpec
from scenarios.scheduling import ServiceClassSpec
from workloads.lengths import Lengths
from workloads.mixes import TaskShare
from workloads.pairs import Independent, LengthPairs


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
        return _share(self, self.task, lengths, classes)


class ClientSpec(Strict):
    """Clients with a part of the requests, by `weight`. All have requests of the same lengths.

    Attributes:
        tenant, service_class, priority: as in `TaskSpec`.
    """

    weight: PositiveFloat = 1.0
    tenant: str = ""
    service_class: str | None = None
    priority: int = 0

    def build(self, lengths: LengthPairs, classes: Mapping[str, ServiceClassSpec]) -> TaskShare:
        """The share of a mix, given the lengths of all requests and the classes by name."""
        return _share(self, "generate", lengths, classes)


def _share(
    spec: TaskSpec | ClientSpec, task: str, lengths: LengthPairs | Lengths, classes: Mapping[str, ServiceClassSpec]
) -> TaskShare:
    """The share of a mix, given the classes by name."""
    if spec.service_class is None:
        return TaskShare(task, spec.weight, lengths, spec.priority, spec.tenant)
    contract = classes[spec.service_class]
    goal = math.inf if contract.ttft is None else contract.ttft
    return TaskShare(task, spec.weight, lengths, contract.priority, spec.tenant, spec.service_class, goal)
