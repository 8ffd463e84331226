"""Sections of a workload on its requests: lengths, `tasks`, `clients`, `service_classes`, `prefixes` and `trace`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from latency_models.io.builtin_files import FilePath
from latency_models.io.config_io import Strict
from scenarios.fields import PREFIX_IDS, BlockTokens, PositiveTokens, PrefixGroups, Tokens, registered
from workloads.checks import MAX_TOKENS
from workloads.errors import BadInput
from workloads.lengths import Fixed, Geometric, Lengths, LogNormal, Uniform
from workloads.mixes import TaskShare
from workloads.pairs import Independent, LengthPairs
from workloads.prefixes import REMEMBERED_RUBRICS, SharedPrefixes
from workloads.traces import AUTO, TRACE_FORMATS, Trace, read_trace


class FixedLengths(Strict):
    """The same length for every request, tokens."""

    distribution: Literal["fixed"]
    mean: Tokens

    def build(self) -> Lengths:
        return Fixed(self.mean)


class GeometricLengths(Strict):
    """Geometric lengths on {1, 2, …} with the given mean, tokens."""

    distribution: Literal["geometric"]
    mean: float = Field(ge=1, le=MAX_TOKENS)

    def build(self) -> Lengths:
        return Geometric(self.mean)


class LogNormalLengths(Strict):
    """Log-normal lengths with the given mean (tokens) and coefficient of variation."""

    distribution: Literal["lognormal"]
    mean: float = Field(ge=1, le=MAX_TOKENS)
    cv: float = Field(default=1.0, ge=1e-6, le=100)

    def build(self) -> Lengths:
        return LogNormal(self.mean, self.cv)


class UniformLengths(Strict):
    """Whole lengths from `low` to `high`, both included, tokens."""

    distribution: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _in_order(self) -> UniformLengths:
        if self.high < self.low:
            raise BadInput(f"expected at least low ({self.low})", field="high", value=self.high)
        return self

    def build(self) -> Lengths:
        return Uniform(self.low, self.high)


LengthSpec = Annotated[
    FixedLengths | GeometricLengths | LogNormalLengths | UniformLengths, Field(discriminator="distribution")
]


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


class TaskSpec(Strict):
    """A kind of request: its share by `weight`, its prompts, answers if any, and its class or priority."""

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
    """Clients with a part of the requests, by `weight`. All have requests of the same lengths."""

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
    if spec.service_class is None:
        return TaskShare(task, spec.weight, lengths, spec.priority, spec.tenant)
    contract = classes[spec.service_class]
    goal = math.inf if contract.ttft is None else contract.ttft
    return TaskShare(task, spec.weight, lengths, contract.priority, spec.tenant, spec.service_class, goal)


class PrefixesSpec(Strict):
    """Prompts that begin alike: `groups` rubrics of `tokens` tokens, of Zipf popularity. See `SharedPrefixes`."""

    groups: PrefixGroups
    tokens: PositiveTokens
    block_tokens: BlockTokens = 16
    zipf: float = Field(default=0.0, ge=0)
    cache_suffix: bool = False

    @model_validator(mode="after")
    def _ids_fit(self) -> PrefixesSpec:
        rubric = self.tokens // self.block_tokens
        total = rubric * min(self.groups, REMEMBERED_RUBRICS)
        if total > PREFIX_IDS.maximum:
            raise BadInput(
                f"{PREFIX_IDS.expectation(total)}; a rubric has {rubric:,}", field="tokens", value=self.tokens
            )
        return self

    def build(self) -> SharedPrefixes:
        return SharedPrefixes(**self.model_dump())

    def check_prompts(self, longest: float, mean: float) -> None:
        """Refuse prompts with too many ids (`cache_suffix`), and prompts that most rubrics do not fit in."""
        ids = int(longest) // self.block_tokens
        if self.cache_suffix and ids > PREFIX_IDS.maximum:
            expected = f"{PREFIX_IDS.expectation(ids)}; a prompt of {longest:g} tokens has {ids:,}"
            raise BadInput(expected, field="prefixes.block_tokens", value=self.block_tokens)
        if self.tokens > mean:
            expected = f"expected at most the mean prompt ({mean:g} tokens), which includes the prefix"
            raise BadInput(expected, field="prefixes.tokens", value=self.tokens)


class TraceSpec(Strict):
    """A recorded workload. `pairing` joint keeps each prompt with its answer, independent shuffles them."""

    path: FilePath | None = None
    format: Annotated[str, registered(TRACE_FORMATS, AUTO)] = AUTO
    pairing: Literal["joint", "independent"] = "joint"

    def read(self, base: Path) -> Trace:
        """The trace. Relative paths start from `base`."""
        if self.path is None:
            raise BadInput("expected a trace file: give --trace FILE", field="workload.trace.path")
        return read_trace(base / self.path, self.format)
