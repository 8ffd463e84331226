"""Chunk policies of an engine: `engine.chunking`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Discriminator, PositiveFloat, PositiveInt, Tag

from latency_models.io.config_io import Strict
from latency_models.step_time import StepTime
from scenarios.limits import StepTokens
from scenarios.registered import registered
from schedulers.chunking import CHUNK_POLICIES, ChunkPolicy, SloChunks, StaticChunks
from workloads.errors import BadInput


class StaticChunksSpec(Strict):
    """At most `tokens` tokens a step, decodes included; with `exclude_decodes`, so many prompt tokens."""

    renamed: ClassVar[Mapping[str, str]] = {"beside": "exclude_decodes"}

    policy: Literal["static"]
    tokens: StepTokens
    exclude_decodes: bool = False

    def build(self, step_time: StepTime | None) -> ChunkPolicy:
        """The policy. The step-time model is not used."""
        return StaticChunks(self.tokens, self.exclude_decodes)


class SloChunksSpec(Strict):
    """The largest chunk c with T(d) + T(c) ≤ `slo_seconds` and `min_tokens` ≤ c ≤ `max_tokens` (SPEAR 4.3).

    Chunks are multiples of `granularity`. T is the table `seconds` over `tokens`. Without one it is the step-time
    model's own, where it has one (ec_tables).
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "goal": "slo_seconds",
        "smallest": "min_tokens",
        "largest": "max_tokens",
        "step": "granularity",
    }

    policy: Literal["slo"]
    slo_seconds: PositiveFloat
    min_tokens: PositiveInt = 16
    max_tokens: PositiveInt = 2048
    granularity: PositiveInt = 1
    tokens: list[PositiveInt] | None = None
    seconds: list[PositiveFloat] | None = None

    def build(self, step_time: StepTime | None) -> ChunkPolicy:
        """The policy.

        Raises:
            BadInput: a table or limits that make none, or no table.
        """
        tokens, seconds = self.tokens, self.seconds
        table = step_time.chunk_table() if step_time and tokens is None and seconds is None else None
        if table is not None:
            tokens, seconds = table
        if tokens is None or seconds is None:
            expected = "expected tokens and seconds, a latency table, unless step_time.source is ec_tables"
            raise BadInput(expected, field="engine.chunking")
        try:
            return SloChunks(tokens, seconds, self.slo_seconds, self.min_tokens, self.max_tokens, self.granularity)
        except ValueError as error:
            raise BadInput(str(error), field="engine.chunking") from None


class RegisteredChunksSpec(Strict):
    """A policy that a plug-in registered in `CHUNK_POLICIES`; the other fields are its parameters."""

    model_config = ConfigDict(extra="allow")

    policy: Annotated[str, registered(CHUNK_POLICIES)]

    def build(self, step_time: StepTime | None) -> ChunkPolicy:
        """The policy.

        Raises:
            BadInput: parameters that it does not take.
        """
        try:
            return CHUNK_POLICIES[self.policy](**self.model_extra or {})
        except (TypeError, ValueError) as error:
            raise BadInput(f"expected parameters of {self.policy}: {error}", field="engine.chunking") from None


def _chunking_kind(value: Any) -> str:
    """The tag of the model that reads a chunk policy: its own for a built-in one, a common one for all others."""
    if isinstance(value, RegisteredChunksSpec):
        return "registered"
    policy = value.get("policy") if isinstance(value, dict) else getattr(value, "policy", None)
    return str(policy) if policy in _WITH_A_MODEL else "registered"


_WITH_A_MODEL = [
    name for spec in (StaticChunksSpec, SloChunksSpec) for name in get_args(spec.model_fields["policy"].annotation)
]


ChunkingSpec = Annotated[
    Annotated[StaticChunksSpec, Tag("static")]
    | Annotated[SloChunksSpec, Tag("slo")]
    | Annotated[RegisteredChunksSpec, Tag("registered")],
    Discriminator(_chunking_kind),
]
