"""Limits on the size of a scenario, and refusals.

A scenario that would exhaust memory is refused while it is checked, before anything is built. The message states what
was requested, what that would take, and the limit. The limits are far above the systems that this simulator is for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from workloads.checks import MAX_TOKENS
from workloads.errors import BadInput


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
