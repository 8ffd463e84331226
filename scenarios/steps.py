"""Sections of an engine that change its steps: `chunking`, `speculative_config` and `pipeline`."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, Tag, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.files import FilePath
from latency_models.sources.registry import StepTimeSpec
from latency_models.stages import StageLink, Stages, stage_layers
from latency_models.step_time import StepTime
from scenarios.fields import PolicySpec, StepTokens, make_policy, registered
from schedulers.step_policies import (
    CHUNK_POLICIES,
    DRAFT_POLICIES,
    ChunkPolicy,
    DraftPolicy,
    PredictedSloChunks,
    SloChunks,
    StaticChunks,
)
from workloads.errors import BadInput


class StaticChunksSpec(Strict):
    """At most `tokens` tokens a step, decodes included; with `exclude_decodes`, this many prompt tokens."""

    policy: Literal["static"]
    tokens: StepTokens
    exclude_decodes: bool = False

    def build(self, step_time: StepTime | None) -> ChunkPolicy:
        """The policy. The step-time model is not used."""
        return StaticChunks(self.tokens, self.exclude_decodes)


class SloChunksSpec(Strict):
    """The largest chunk c with T(d) + T(c) ≤ `slo_seconds` and `min_tokens` ≤ c ≤ `max_tokens` (SPEAR 4.3).

    T is the table `seconds` over `tokens`, or that of the step-time model (ec_tables). Without either, the model
    predicts the step itself, and where it knows how much single steps scatter, `quantile` of them should keep the goal.
    """

    policy: Literal["slo"]
    slo_seconds: PositiveFloat
    min_tokens: PositiveInt = 16
    max_tokens: PositiveInt = 2048
    granularity: PositiveInt = 1
    quantile: float = Field(default=0.99, ge=0.5, lt=1)
    tokens: list[PositiveInt] | None = None
    seconds: list[PositiveFloat] | None = None

    def build(self, step_time: StepTime | None) -> ChunkPolicy:
        limits = self.min_tokens, self.max_tokens, self.granularity
        table = (self.tokens, self.seconds)
        if table == (None, None) and step_time is not None:
            table = step_time.chunk_table() or table
        tokens, seconds = table
        try:
            if tokens is not None and seconds is not None:
                return SloChunks(tokens, seconds, self.slo_seconds, *limits)
            if table == (None, None) and step_time is not None:
                margin = math.exp(NormalDist().inv_cdf(self.quantile) * step_time.scatter())
                return PredictedSloChunks(step_time.mixed_seconds, self.slo_seconds / margin, *limits)
            raise ValueError("expected tokens and seconds, a latency table, or step times to predict steps by")
        except ValueError as error:
            raise BadInput(str(error), field="engine.chunking") from None


class RegisteredChunksSpec(PolicySpec):
    """A policy that a plug-in registered in `CHUNK_POLICIES`; the other fields are its parameters."""

    policy: Annotated[str, registered(CHUNK_POLICIES)]

    def build(self, step_time: StepTime | None) -> ChunkPolicy:
        """The policy. The step-time model is not used."""
        return make_policy(CHUNK_POLICIES, self.policy, self.parameters, field="engine.chunking")


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


Share = Annotated[float, Field(ge=0.0, le=1.0)]
Method = Literal["ngram", "draft_model", "mtp"]
MOST_DRAFT_TOKENS = 64


class DraftPolicySpec(PolicySpec):
    """A policy of `DRAFT_POLICIES`; the other fields are its parameters."""

    policy: Annotated[str, registered(DRAFT_POLICIES)] = "fixed"


class SpeculativeSpec(Strict):
    """Speculative decoding; names are vLLM's where it has the setting (docs/reference/serving-scenario.md)."""

    method: Method
    num_speculative_tokens: Annotated[int, Field(ge=1, le=MOST_DRAFT_TOKENS)]
    prompt_lookup_min: PositiveInt = 2
    prompt_lookup_max: PositiveInt = 5
    drafts: DraftPolicySpec = Field(default_factory=DraftPolicySpec)
    acceptance: Share | None = None
    acceptance_by_position: list[Share] | None = None
    acceptance_by_model: dict[str, list[Share]] = Field(default_factory=dict)
    acceptance_profile: FilePath | None = None
    proposed: Share = 1.0
    draft_step_time: StepTimeSpec | None = None

    @model_validator(mode="after")
    def _agree(self) -> SpeculativeSpec:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"expected prompt_lookup_min of at most prompt_lookup_max ({self.prompt_lookup_max})")
        if self.acceptance is not None and self.acceptance_by_position is not None:
            raise ValueError("expected either acceptance or acceptance_by_position")
        if self.acceptance_profile is not None and self.states_acceptance:
            raise ValueError("expected no acceptance, acceptance_by_… or proposed beside acceptance_profile")
        stated = {"acceptance_by_position": self.acceptance_by_position or []}
        stated |= {f"acceptance_by_model.{name}": shares for name, shares in self.acceptance_by_model.items()}
        for name, shares in stated.items():
            if shares and len(shares) != self.num_speculative_tokens:
                raise ValueError(f"{name}: expected {self.num_speculative_tokens} shares, one a position")
            if any(later > earlier for earlier, later in pairwise(shares)):
                raise ValueError(f"{name}: expected shares that do not rise, since a token is accepted after another")
        if self.method == "ngram" and self.draft_step_time is not None:
            raise ValueError("expected no draft_step_time: ngram has no draft model")
        return self

    @property
    def states_acceptance(self) -> bool:
        """True if the scenario states shares of draft tokens that are right, or of decodes that have drafts."""
        stated = self.acceptance is not None or self.acceptance_by_position is not None
        return stated or bool(self.acceptance_by_model) or self.proposed != 1.0

    def policy(self, step_time: StepTime | None) -> DraftPolicy:
        """A new policy. `goodput` without a table takes the step times' own, where they have one."""
        field, parameters = "engine.speculative_config.drafts", self.drafts.parameters
        if self.drafts.policy == "goodput" and "tokens" not in parameters:
            table = None if step_time is None else step_time.chunk_table()
            if table is None:
                expected = "expected tokens and seconds, a latency table, unless step_time.source is ec_tables"
                raise BadInput(expected, field=field)
            parameters["tokens"], parameters["seconds"] = table
        return make_policy(DRAFT_POLICIES, self.drafts.policy, parameters, self.num_speculative_tokens, field=field)

    def shares(self) -> tuple[float, ...] | None:
        """The share of drafts whose token at each position is accepted; None where the scenario does not say."""
        if self.acceptance_by_position is not None:
            return tuple(self.acceptance_by_position)
        if self.acceptance is None:
            return None
        return tuple(self.acceptance ** (position + 1) for position in range(self.num_speculative_tokens))


class StageLinkSpec(Strict):
    """The link from one stage to the next: bytes/s, seconds, and bytes of a token's activations."""

    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    bytes_per_token: NonNegativeFloat


class PipelineSpec(Strict):
    """The layers of each stage, as `VLLM_PP_LAYER_PARTITION`, and the link; by default as the step times know."""

    layers: list[PositiveInt] | None = Field(default=None, min_length=1)
    link: StageLinkSpec | None = None

    def build(self, stages: int, step_time: StepTime | None) -> Stages:
        deployment = step_time.measured_deployment() if step_time else None
        layers = deployment.model.layers if deployment is not None and deployment.model is not None else None
        if self.layers is not None:
            if len(self.layers) != stages:
                expected = f"expected {stages} numbers, one for each stage of pipeline_parallel_size"
                raise BadInput(expected, field="engine.pipeline.layers", value=self.layers)
            if layers is not None and sum(self.layers) != layers:
                expected = f"expected {layers} layers in all, as the model of step_time has"
                raise BadInput(expected, field="engine.pipeline.layers", value=self.layers)
            divided = self.layers
        elif layers is None:
            divided = [1] * stages
        elif layers < stages:
            expected = f"expected at most the layers there are ({layers})"
            raise BadInput(expected, field="engine.pipeline_parallel_size", value=stages)
        else:
            divided = stage_layers(layers, stages)
        if self.link is not None:
            return Stages(tuple(divided), StageLink(**self.link.model_dump()))
        if step_time is None or step_time.send_seconds(1) is None:
            expected = "expected bandwidth and bytes_per_token, since step_time does not know the link between stages"
            raise BadInput(expected, field="engine.pipeline.link")
        return Stages(tuple(divided))
