"""Draft policies: how many draft tokens each decode of a step may verify (speculative decoding)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import Final, Protocol

from schedulers.chunking import check_table, interpolate
from workloads.registry import Registry

MEMORY: Final = 0.99
"""The weight of an observation after a further one, so that the acceptance of some hundred drafts is remembered."""


class DraftPolicy(Protocol):
    """Limits the draft tokens of a step, given its decodes.

    A policy whose `learns` is False gives the same number for the same decodes, whatever it has observed. Simulations
    pass over steps with such a policy.
    """

    def num_draft_tokens(self, num_decodes: int) -> int:
        """Draft tokens of each decode in a step with `num_decodes` decodes, at least 0."""

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn that of `num_drafted` draft tokens of one decode, at least 1, the first `num_accepted` were right."""


class FixedDrafts:
    """Always `num_speculative_tokens` draft tokens, as vLLM."""

    learns = False

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def num_draft_tokens(self, num_decodes: int) -> int:
        return self.num_speculative_tokens

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """See `DraftPolicy.observe`. Nothing is learned."""


class DraftsByBatchSize:
    """Fewer draft tokens for larger batches, by a table.

    Args:
        decodes, drafts: the first row whose `decodes` is not below the number of decodes gives the draft tokens; beyond
            the last row there are none. [32] and [4] is what older engines call disabling by batch size.

    Raises:
        ValueError: columns of different lengths, or numbers of decodes that do not rise.
    """

    learns = False

    def __init__(self, num_speculative_tokens: int, decodes: Many[int], drafts: Many[int]) -> None:
        if len(decodes) != len(drafts) or not decodes:
            raise ValueError(f"expected two columns of one length, found {len(decodes)} and {len(drafts)} rows")
        if any(later <= earlier for earlier, later in pairwise(decodes)):
            raise ValueError(f"expected numbers of decodes that rise, found {list(decodes)}")
        if min(drafts) < 0 or max(drafts) > num_speculative_tokens:
            raise ValueError(f"expected 0 to {num_speculative_tokens} draft tokens, found {list(drafts)}")
        self._decodes = list(decodes)
        self._drafts = list(drafts)

    def num_draft_tokens(self, num_decodes: int) -> int:
        for decodes, drafts in zip(self._decodes, self._drafts, strict=True):
            if num_decodes <= decodes:
                return drafts
        return 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """See `DraftPolicy.observe`. Nothing is learned."""


class GoodputDrafts:
    """The number of draft tokens with the most emitted tokens a second (SmartSpec, arXiv:2406.14066).

    With k draft tokens a decode emits (1 − α^(k+1)) / (1 − α) tokens in the mean, and a step of n decodes takes
    T(n·(k + 1)). The acceptance α of a draft token is estimated from the drafts that were verified, recent ones first
    (their number is a geometric one, cut off at k). One draft token at least is tried now and then, so that an α that
    rises is noticed.

    Args:
        num_speculative_tokens: the most draft tokens.
        tokens, seconds: the table T, both increasing: step times by token count.
        acceptance: α before anything was seen; it weighs as much as `prior` drafts.
        explore: every this many steps in which no draft would pay, one draft token is tried.

    Raises:
        ValueError: a table that is empty or does not increase.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        tokens: Many[int],
        seconds: Many[float],
        acceptance: float = 0.7,
        prior: float = 10.0,
        explore: int = 50,
    ) -> None:
        check_table(tokens, seconds)
        self.num_speculative_tokens = num_speculative_tokens
        self.explore = explore
        self._tokens = list(tokens)
        self._seconds = list(seconds)
        self._accepted = acceptance * prior
        self._tried = prior
        self._steps_without = 0

    @property
    def acceptance(self) -> float:
        """The present estimate of α."""
        return self._accepted / self._tried

    def num_draft_tokens(self, num_decodes: int) -> int:
        best, best_rate, emitted, chance = 0, 0.0, 0.0, 1.0
        for drafts in range(self.num_speculative_tokens + 1):
            emitted += chance
            chance *= self.acceptance
            rate = emitted / max(interpolate(self._tokens, self._seconds, num_decodes * (drafts + 1)), 1e-12)
            if rate > best_rate:
                best, best_rate = drafts, rate
        if best:
            self._steps_without = 0
            return best
        self._steps_without += 1
        return 1 if self.explore and self._steps_without % self.explore == 0 else 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self._accepted = MEMORY * self._accepted + num_accepted
        self._tried = MEMORY * self._tried + num_accepted + (num_accepted < num_drafted)


DRAFT_POLICIES: Registry[Callable[..., DraftPolicy]] = Registry(
    fixed=FixedDrafts, by_batch_size=DraftsByBatchSize, goodput=GoodputDrafts
)
"""Makes a policy from its parameters, the first of which is `num_speculative_tokens`. Each engine has its own."""
