"""Prompts that begin alike: `workload.prefixes`."""

from __future__ import annotations

from pydantic import Field, model_validator

from latency_models.io.config_io import Strict
from scenarios.limits import PREFIX_IDS, BlockTokens, PositiveTokens, PrefixGroups
from workloads.errors import BadInput
from workloads.prefixes import REMEMBERED_RUBRICS, SharedPrefixes


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
        if total > PREFIX_IDS.most:
            raise BadInput(
                f"{PREFIX_IDS.expectation(total)}; a rubric has {rubric:,}", field="tokens", value=self.tokens
            )
        return self

    def build(self) -> SharedPrefixes:
        """The prefixes of a workload."""
        return SharedPrefixes(**self.model_dump())

    def check_prompt(self, tokens: float) -> None:
        """Refuse a prompt with too many ids: with `cache_suffix`, every block of a prompt has one.

        Raises:
            BadInput: a prompt of so many tokens has more ids than the limit.
        """
        ids = int(tokens) // self.block_tokens
        if self.cache_suffix and ids > PREFIX_IDS.most:
            expected = f"{PREFIX_IDS.expectation(ids)}; a prompt of {tokens:g} tokens has {ids:,}"
            raise BadInput(expected, field="prefixes.block_tokens", value=self.block_tokens)
