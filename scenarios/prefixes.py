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

    def check_prompts(self, longest: float, mean: float) -> None:
        """Refuse prompts with too many ids, and prompts that most rubrics do not fit in.

        With `cache_suffix`, every block of a prompt has an id. A prompt's tokens include those of its rubric.

        Raises:
            BadInput: the longest of the prompts has more ids than the limit, or their mean is below a rubric.
        """
        ids = int(longest) // self.block_tokens
        if self.cache_suffix and ids > PREFIX_IDS.most:
            expected = f"{PREFIX_IDS.expectation(ids)}; a prompt of {longest:g} tokens has {ids:,}"
            raise BadInput(expected, field="prefixes.block_tokens", value=self.block_tokens)
        if self.tokens > mean:
            expected = f"expected at most the mean prompt ({mean:g} tokens), which includes the prefix"
            raise BadInput(expected, field="prefixes.tokens", value=self.tokens)
