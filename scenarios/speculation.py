"""Speculative decoding of an engine: `engine.speculative_config`."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PositiveInt, model_validator

from latency_models.io.config_io import Strict
from latency_models.io.paths import FilePath
from latency_models.sources.registry import StepTimeSpec
from latency_models.step_time import StepTime
from scenarios.registered import registered
from schedulers.draft_policies import DRAFT_POLICIES, DraftPolicy
from workloads.errors import BadInput

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Method = Literal["ngram", "draft_model"]
MOST_DRAFT_TOKENS = 64


class DraftPolicySpec(Strict):
    """A policy of `DRAFT_POLICIES`; the other fields are its parameters."""

    model_config = ConfigDict(extra="allow")

    policy: Annotated[str, registered(DRAFT_POLICIES)] = "fixed"


class SpeculativeSpec(Strict):
    """Speculative decoding; names are vLLM's where vLLM has the setting.

    Attributes:
        method: `ngram`: drafts are what followed the latest tokens earlier in the sequence (prompt lookup).
            `draft_model`: a small model, or layers of the model itself (EAGLE, MTP), whose passes take time.
        num_speculative_tokens: the most draft tokens of a decode in a step.
        prompt_lookup_min, prompt_lookup_max: tokens of the n-grams that `ngram` looks up, longest first.
        drafts: how many draft tokens a step has under load.
        acceptance: in simulation, the probability that a draft token is right, given that those before it are.
        acceptance_by_position: instead, the share of drafts whose token at each position is accepted: vLLM's
            `num_accepted_tokens_per_pos` over `num_drafts`. acceptance_by_model: the same for requests of a model.
        acceptance_profile: instead, a file of measured outcomes, `twin.draft-outcomes/1`, which `twin validate` writes.
        proposed: in simulation, the share of decodes for which there is a draft.
        draft_step_time: in simulation, step times of the draft model.
    """

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
        given = {"acceptance_by_position": self.acceptance_by_position or []}
        given |= {f"acceptance_by_model.{name}": shares for name, shares in self.acceptance_by_model.items()}
        for name, shares in given.items():
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
        """A new policy. `goodput` without a table takes the step times' own, where they have one.

        Raises:
            BadInput: parameters that it does not take.
        """
        name, parameters = self.drafts.policy, dict[str, Any](self.drafts.model_extra or {})
        if name == "goodput" and "tokens" not in parameters:
            table = step_time.chunk_table() if step_time is not None else None
            if table is None:
                expected = "expected tokens and seconds, a latency table, unless step_time.source is ec_tables"
                raise BadInput(expected, field="engine.speculative_config.drafts")
            parameters["tokens"], parameters["seconds"] = table
        try:
            return DRAFT_POLICIES[name](self.num_speculative_tokens, **parameters)
        except (TypeError, ValueError) as error:
            field = "engine.speculative_config.drafts"
            raise BadInput(f"expected parameters of {name}: {error}", field=field) from None

    def shares(self) -> tuple[float, ...] | None:
        """The share of drafts whose token at each position is accepted; None where the scenario does not say."""
        if self.acceptance_by_position is not None:
            return tuple(self.acceptance_by_position)
        if self.acceptance is None:
            return None
        return tuple(self.acceptance ** (position + 1) for position in range(self.num_speculative_tokens))
