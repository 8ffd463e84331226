"""Types of a scenario's fields: sizes with limits, names of policies, goals, lengths, and refusals.

A scenario that would exhaust memory is refused while it is checked, before anything is built. The message states what
was requested, what that would take, and the limit. The limits are far above the systems that this simulator is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from latency_models.io.config_io import Strict
from latency_models.io.files import FilePath
from workloads.checks import MAX_TOKENS
from workloads.errors import BadInput
from workloads.lengths import Fixed, Geometric, Lengths, LogNormal, Uniform
from workloads.registry import Registry


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number of a kind of thing, with bytes of one, as measured; 0 where the limit has another reason."""

    maximum: int
    things: str
    num_bytes: int = 0

    def check(self, value: int) -> int:
        """Return `value` if it is within the limit, else raise `BadInput`."""
        if value > self.maximum:
            raise BadInput(self.expectation(value), value=value)
        return value

    def expectation(self, value: int) -> str:
        """The expectation in place of `value`, for an error."""
        memory = f": so many would take {_size(value * self.num_bytes)} of memory" if self.num_bytes else ""
        return f"expected at most {self.maximum:,} {self.things}{memory}"


def refuse_first(refusals: Iterable[tuple[object, str | None, object, str]], file: Path | None = None) -> None:
    """Raise `BadInput` for the first that holds of (is it refused?, field, value, what is expected)."""
    for is_refused, field, value, expected in refusals:
        if is_refused:
            raise BadInput(expected, field=field, value=value, file=file)


def _size(count: int) -> str:
    for power, unit in ((18, "EB"), (15, "PB"), (12, "TB"), (9, "GB")):
        if count >= 10**power:
            return f"some {count // 10**power:,} {unit}" if count < 10 ** (power + 6) else f"over a million {unit}"
    return f"some {count // 10**6:,} MB"


ENGINES = Limit(100_000, "engines", 6_500)
REQUESTS = Limit(10_000_000, "requests", 220)
KV_BLOCKS = Limit(10**9, "KV blocks")
PREFIX_IDS = Limit(10_000_000, "ids of prompt blocks", 40)
SESSION_IDS = Limit(1_000_000, "ids of prompt blocks")
RING_PLACES = Limit(20_000_000, "virtual nodes of all engines", 400)
SLOTS = Limit(10_000_000, "slots of a bundle", 600)
BUNDLE_REQUESTS = Limit(50_000_000, "requests of a bundle", 230)
REPLICATIONS = Limit(10_000, "replications")
DRAWS = Limit(10_000, "draws")
SWEEP_POINTS = Limit(10_000, "combinations of values")
DECISIONS = Limit(10_000_000, "decisions of autoscaling")
RUNS = Limit(100_000, "runs")

Engines = Annotated[PositiveInt, AfterValidator(ENGINES.check)]
Models = Annotated[PositiveInt, AfterValidator(Limit(100_000, "models").check)]
Requests = Annotated[PositiveInt, AfterValidator(REQUESTS.check)]
Clients = Annotated[PositiveInt, AfterValidator(Limit(1_000_000, "clients", 900).check)]
KVBlocks = Annotated[PositiveInt, AfterValidator(KV_BLOCKS.check)]
BlockTokens = Annotated[PositiveInt, AfterValidator(Limit(10**6, "tokens a block").check)]
StepTokens = Annotated[PositiveInt, AfterValidator(Limit(10**8, "tokens a step").check)]
Sequences = Annotated[PositiveInt, AfterValidator(Limit(10**6, "sequences").check)]
PipelineStages = Annotated[PositiveInt, AfterValidator(Limit(1_000, "pipeline stages").check)]
PrefixGroups = Annotated[PositiveInt, AfterValidator(Limit(10**7, "rubrics", 16).check)]
VirtualNodes = Annotated[PositiveInt, AfterValidator(Limit(10_000, "virtual nodes of an engine").check)]
Slots = Annotated[PositiveInt, AfterValidator(SLOTS.check)]
Microbatches = Annotated[PositiveInt, AfterValidator(Limit(1_000, "microbatches").check)]
Layers = Annotated[PositiveInt, AfterValidator(Limit(10_000, "layers").check)]
Repeats = Annotated[int, AfterValidator(Limit(1_000, "repeats").check)]
Probes = Annotated[int, AfterValidator(Limit(100_000, "rounds or steps").check)]
Threads = Annotated[PositiveInt, AfterValidator(Limit(1_024, "threads").check)]
Ranks = Annotated[PositiveInt, AfterValidator(Limit(64, "ranks").check)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
PositiveTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


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


LATENCY = re.compile(r"(?:(?P<of>[\w-]+)\.)?(?P<metric>ttft|tpot|itl|e2e)_(?P<statistic>mean|p\d{1,2}(?:\.\d+)?)")
THROUGHPUTS = ("output_throughput", "request_throughput")
TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
SHARES = {"": 1.0, "%": 1e-2}
LONGEST = {"ttft": 300.0, "tpot": 10.0, "itl": 10.0, "e2e": 3600.0}
"""Seconds of a latency above which a number without a unit can only be meant in milliseconds."""
_VALUE = re.compile(r"\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([a-z%]*)\s*")
KNOWN = (
    "expected METRIC_STATISTIC such as ttft_p99, tpot_mean or classify.e2e_p95 (ttft, tpot, itl, e2e; mean or a "
    "percentile), goodput, output_throughput or request_throughput"
)


@dataclass(frozen=True)
class Goal:
    """One goal: `ttft`, `tpot`, `itl`, `e2e`, `goodput`, or a throughput; its limit in seconds, a share, or a rate.

    `quantile`: of a percentile; None for others. `of`: the task or model of its requests; None: all of them.
    """

    name: str
    metric: str
    limit: float
    quantile: float | None = None
    of: str | None = None

    @property
    def at_most(self) -> bool:
        """True for latencies, which must not exceed the limit; the others must reach it."""
        return self.metric in ("ttft", "tpot", "itl", "e2e")

    @property
    def of_whole_requests(self) -> bool:
        """True for goals that a client's times of its requests decide: no single tokens, tasks or goodput."""
        return self.of is None and (self.metric in ("ttft", "tpot", "e2e") or self.metric in THROUGHPUTS)

    def ratio(self, value: float) -> float:
        """The value relative to the limit, such that 1 is the limit and more is a miss."""
        if self.at_most:
            return value / self.limit
        return self.limit / value if value > 0 else float("inf")


def read_goals(limits: Mapping[str, float | str]) -> list[Goal]:
    return [read_goal(name, limit) for name, limit in limits.items()]


def refuse_milliseconds(metric: str, limit: float, field: str) -> None:
    """Refuse a number of seconds that can only be meant in milliseconds."""
    if limit > LONGEST.get(metric, float("inf")):
        expected = f"expected seconds, at most {LONGEST[metric]:g}; {limit / 1000:g} is {limit:g} milliseconds"
        raise BadInput(expected, field=field, value=limit)


def read_goal(name: str, limit: float | str) -> Goal:
    value = _number(name, limit)
    if name == "goodput":
        if value > 1:
            raise BadInput("expected a share of the requests, at most 1 or 100%", field=name, value=limit)
        return Goal(name, name, value)
    if name in THROUGHPUTS:
        return Goal(name, name, value)
    match = LATENCY.fullmatch(name)
    if match is None:
        raise BadInput(KNOWN, field="goals", value=name)
    of, metric, statistic = match["of"], match["metric"], match["statistic"]
    if has_no_unit(limit):
        refuse_milliseconds(metric, value, name)
    if of is not None and metric == "itl":
        raise BadInput("expected ttft, tpot or e2e: ITL is of steps, which serve all requests", field=name, value=name)
    quantile = None if statistic == "mean" else float(statistic[1:]) / 100
    if quantile == 0:
        raise BadInput("expected a percentile above 0", field="goals", value=name)
    return Goal(name, metric, value, quantile, of)


def has_no_unit(limit: float | str) -> bool:
    """True for a number, also as text."""
    match = _VALUE.fullmatch(limit) if isinstance(limit, str) else None
    return not isinstance(limit, str) or (match is not None and not match[2])


def _number(name: str, limit: float | str) -> float:
    if isinstance(limit, str):
        match, units = _VALUE.fullmatch(limit), SHARES if name == "goodput" else TIMES
        if match is None or match[2] not in units:
            examples = "95%" if name == "goodput" else "1s, 40ms"
            raise BadInput(f"expected a number, or one with a unit: {examples}", field=name, value=limit)
        try:
            limit = float(match[1]) * units[match[2]]
        except ValueError:
            raise BadInput("expected a number", field=name, value=limit) from None
    if not limit > 0:
        raise BadInput("expected a number above 0", field=name, value=limit)
    return float(limit)


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


class MeasureSpec(Strict):
    """The measurements; TTFT and E2E begin when a request is `submitted`, or `queued` by the engine between steps."""

    start: Literal["submitted", "queued"] = "submitted"
    after: NonNegativeFloat = 0.0
    before: PositiveFloat | None = None
    prefix_cache: bool = False
    slo: dict[Literal["ttft", "tpot", "e2e"], PositiveFloat] = Field(default_factory=dict)

    @field_validator("slo")
    @classmethod
    def _in_seconds(cls, slo: dict[str, float]) -> dict[str, float]:
        for name, limit in slo.items():
            refuse_milliseconds(name, limit, f"slo.{name}")
        return slo


class MeasuredSpec(Strict):
    """A real run to set beside the prediction: JSON lines with times of each request. Nothing is fitted to it."""

    requests: FilePath
    timeseries: FilePath | None = None
