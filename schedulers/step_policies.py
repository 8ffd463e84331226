"""Policies that are asked in every step: the most prompt tokens beside its decodes, and draft tokens of a decode."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import Final, Protocol, TypeAlias

from workloads.registry import Registry


def interpolate(x: Many[int], y: Many[float], tokens: int) -> float:
    """y at `tokens`: linear between the points of x, which increase, extrapolated beyond them; 0 for 0 tokens."""
    if tokens <= 0:
        return 0.0
    i = min(max(bisect_right(x, tokens), 1), len(x) - 1)
    return y[i - 1] + (y[i] - y[i - 1]) * (tokens - x[i - 1]) / (x[i] - x[i - 1])


class StepTable:
    """Step times by token count.

    Raises:
        ValueError: columns that are too short, of two lengths, or not increasing.
    """

    def __init__(self, tokens: Many[int], seconds: Many[float]) -> None:
        if len(tokens) != len(seconds) or len(tokens) < 2:
            raise ValueError(f"expected two columns of at least 2 rows, found {len(tokens)} and {len(seconds)}")
        for column in (tokens, seconds):
            if any(later <= earlier for earlier, later in pairwise(column)):
                raise ValueError(f"expected a table that increases, found {list(column)}")
        self.tokens = list(tokens)
        self.seconds = list(seconds)

    def at(self, tokens: int) -> float:
        return interpolate(self.tokens, self.seconds, tokens)


class ChunkPolicy(Protocol):
    """Limits the prompt tokens of a step, given its decodes."""

    def max_prefill_tokens(
        self, num_decodes: int, decode_kv: int = 0, longest_decode: int = 0, context: int = 0
    ) -> int:
        """Prompt tokens that a step with `num_decodes` decodes may compute, at least 0.

        The token budget of the engine holds as well. `decode_kv`, `longest_decode`: as in `Batch`. `context`: tokens of
        the first prompt under way that are in the cache already.
        """


class StaticChunks:
    """At most `tokens` tokens a step, decodes included: the token budget of chunked prefill (Sarathi-Serve).

    `exclude_decodes`: the limit is for prompt tokens alone (static chunks of SPEAR 5.3.3).
    """

    def __init__(self, tokens: int, exclude_decodes: bool = False) -> None:
        self.tokens = tokens
        self.exclude_decodes = exclude_decodes

    def max_prefill_tokens(
        self, num_decodes: int, decode_kv: int = 0, longest_decode: int = 0, context: int = 0
    ) -> int:
        return self.tokens if self.exclude_decodes else max(self.tokens - num_decodes, 0)


class _GoalChunks:
    """The limits that policies with a latency goal have in common: T_SLO, c_min and c_max.

    Where not even c_min fits, c_min is used, since prompts must progress. The SLO can then be missed, when decodes
    alone take nearly all of it. Chunks are rounded down to multiples of `granularity`, but not below c_min. Raises
    ValueError for limits in the wrong order, or a granularity below 1.
    """

    def __init__(self, slo_seconds: float, min_tokens: int, max_tokens: int, granularity: int) -> None:
        if not 1 <= min_tokens <= max_tokens:
            raise ValueError(f"expected 1 <= smallest <= largest, found {min_tokens} and {max_tokens}")
        if granularity < 1:
            raise ValueError(f"expected a step of at least 1, found {granularity}")
        self.slo_seconds = slo_seconds
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self.granularity = granularity

    def rounded(self, chunk: int) -> int:
        """A chunk as a multiple of the granularity."""
        return max(chunk - chunk % self.granularity, self.min_tokens)


class SloChunks(_GoalChunks):
    """The largest chunk c with T(d) + T(c) ≤ T_SLO and c_min ≤ c ≤ c_max (SPEAR 4.3).

    T is the iteration latency of the current selection S of error compensators: a table over token counts, linear
    between its points and extrapolated with its last slope; T(0) = 0. `tokens`, `seconds`: its columns.
    """

    def __init__(
        self,
        tokens: Many[int],
        seconds: Many[float],
        slo_seconds: float,
        min_tokens: int = 16,
        max_tokens: int = 2048,
        granularity: int = 1,
    ) -> None:
        super().__init__(slo_seconds, min_tokens, max_tokens, granularity)
        self._table = StepTable(tokens, seconds)
        self.seconds = self._table.at

    def max_prefill_tokens(
        self, num_decodes: int, decode_kv: int = 0, longest_decode: int = 0, context: int = 0
    ) -> int:
        """See `ChunkPolicy.max_prefill_tokens`: bisection over the rows of the table, then the line between two."""
        seconds = self.slo_seconds - self.seconds(num_decodes)
        if self.seconds(self.max_tokens) <= seconds:
            return self.rounded(self.max_tokens)
        x, y = self._table.tokens, self._table.seconds
        i = min(max(bisect_right(y, seconds), 1), len(y) - 1)
        chunk = x[i - 1] + int((seconds - y[i - 1]) * (x[i] - x[i - 1]) / (y[i] - y[i - 1]))
        chunk = min(max(chunk, self.min_tokens), self.max_tokens)
        # Rounding may put the chunk off by one, so T itself decides.
        while chunk > self.min_tokens and self.seconds(chunk) > seconds:
            chunk -= 1
        while chunk < self.max_tokens and self.seconds(chunk + 1) <= seconds:
            chunk += 1
        return self.rounded(chunk)


StepSeconds: TypeAlias = Callable[[int, int, int, int, int], float]
"""Predicts the seconds of a step from the arguments of `max_prefill_tokens` and the tokens of its chunk."""


class PredictedSloChunks(_GoalChunks):
    """The largest chunk whose step is predicted to take at most T_SLO (SPEAR 4.3, for any step-time model).

    SPEAR's T(d) + T(c) counts tokens alone and two passes. Here the model predicts the step itself, with its one pass
    and its cached tokens. `step_seconds`: the prediction, which should not fall as the chunk grows.
    """

    def __init__(
        self,
        step_seconds: StepSeconds,
        slo_seconds: float,
        min_tokens: int = 16,
        max_tokens: int = 2048,
        granularity: int = 1,
    ) -> None:
        super().__init__(slo_seconds, min_tokens, max_tokens, granularity)
        self.step_seconds = step_seconds

    def max_prefill_tokens(
        self, num_decodes: int, decode_kv: int = 0, longest_decode: int = 0, context: int = 0
    ) -> int:
        """See `ChunkPolicy.max_prefill_tokens`: doubles the chunk while it fits, then bisects.

        So no step is predicted that is much longer than the one that runs.
        """

        def fits(tokens: int) -> bool:
            seconds = self.step_seconds(num_decodes, decode_kv, longest_decode, context, tokens)
            return seconds <= self.slo_seconds

        low, high = self.min_tokens, self.min_tokens
        while high < self.max_tokens and high == low:
            high = min(2 * low, self.max_tokens)
            if fits(high):
                low = high
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return self.rounded(low)


CHUNK_POLICIES: Registry[Callable[..., ChunkPolicy]] = Registry(static=StaticChunks, slo=SloChunks)
"""Makes a policy from its parameters, which a scenario gives by name. Each engine has a policy of its own.

A scenario's `slo` without a table is `PredictedSloChunks` of its step times.
"""


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


class _UnlearnedDrafts:
    learns = False

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """See `DraftPolicy.observe`. Nothing is learned."""


class FixedDrafts(_UnlearnedDrafts):
    """Always `num_speculative_tokens` draft tokens, as vLLM."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def num_draft_tokens(self, num_decodes: int) -> int:
        return self.num_speculative_tokens


class DraftsByBatchSize(_UnlearnedDrafts):
    """Fewer draft tokens for larger batches, by a table. Raises ValueError for columns that cannot be one.

    The first row whose `decodes` is not below the number of decodes gives the draft tokens; beyond the last row there
    are none. [32] and [4] is what older engines call disabling by batch size.
    """

    def __init__(self, num_speculative_tokens: int, decodes: Many[int], drafts: Many[int]) -> None:
        if len(decodes) != len(drafts) or not decodes:
            raise ValueError(f"expected two columns of one length, found {len(decodes)} and {len(drafts)} rows")
        if any(later <= earlier for earlier, later in pairwise(decodes)):
            raise ValueError(f"expected numbers of decodes that rise, found {list(decodes)}")
        if min(drafts) < 0 or max(drafts) > num_speculative_tokens:
            raise ValueError(f"expected 0 to {num_speculative_tokens} draft tokens, found {list(drafts)}")
        self._rows = list(zip(decodes, drafts, strict=True))

    def num_draft_tokens(self, num_decodes: int) -> int:
        return next((drafts for decodes, drafts in self._rows if num_decodes <= decodes), 0)


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
        self.num_speculative_tokens = num_speculative_tokens
        self.explore = explore
        self._table = StepTable(tokens, seconds)
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
            rate = emitted / max(self._table.at(num_decodes * (drafts + 1)), 1e-12)
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
