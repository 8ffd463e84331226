"""Types of a scenario's fields: sizes with limits, names of policies, and refusals.

A scenario that would exhaust memory is refused while it is checked, before anything is built. The message states what
was requested, what that would take, and the limit. The limits are far above the systems that this simulator is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, PositiveInt

from latency_models.io.config_io import Strict
from workloads.checks import MAX_TOKENS
from workloads.errors import BadInput
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


def refuse_first(refusals: Iterable[tuple[object, str, object, str]], file: Path | None = None) -> None:
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
