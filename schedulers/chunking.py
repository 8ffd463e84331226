"""How many prompt tokens a step may hold beside its decodes: chunk policies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import Protocol


def interpolate(x: Many[int], y: Many[float], tokens: int) -> float:
    """y at `tokens`, linear between the points of x (which increase), beyond them along the nearest two; 0 of none."""
    if tokens <= 0:
        return 0.0
    i = min(max(bisect_right(x, tokens), 1), len(x) - 1)
    return y[i - 1] + (y[i] - y[i - 1]) * (tokens - x[i - 1]) / (x[i] - x[i - 1])


class ChunkPolicy(Protocol):
    """Handed the decodes of a step, says how many prompt tokens may join them."""

    def allowance(self, decodes: int) -> int:
        """Prompt tokens, at least 0. The step's token budget holds besides."""
        ...


class StaticChunks:
    """At most `tokens` rows a step, decodes included: chunked prefill as engines have it (Sarathi's token budget).

    `beside`: prompt tokens instead, beside however many decodes (the static chunk sizes of SPEAR 5.3.3).
    """

    def __init__(self, tokens: int, beside: bool = False) -> None:
        self.tokens, self.beside = tokens, beside

    def allowance(self, decodes: int) -> int:
        """As `ChunkPolicy.allowance`."""
        return self.tokens if self.beside else max(self.tokens - decodes, 0)


class SloChunks:
    """The largest chunk c with T(d) + T(c) ≤ T_SLO, c_min ≤ c ≤ c_max (SPEAR 4.3).

    T is the iteration latency of the current selection S of error compensators, tabulated over token counts and
    linear between them; T(0) = 0, and beyond the table its last slope goes on. Where not even c_min fits, c_min it is:
    prompts must move, so the goal can be missed when decodes alone take nearly all of it.

    Args:
        tokens, seconds: the table, both increasing.
        goal: T_SLO, seconds.
        smallest, largest: c_min and c_max, tokens.
        step: chunks are multiples of it, rounded down, but not below c_min.

    Raises:
        ValueError: a table that is empty or does not increase, limits in the wrong order, or a step below 1.
    """

    def __init__(
        self,
        tokens: Many[int],
        seconds: Many[float],
        goal: float,
        smallest: int = 16,
        largest: int = 2048,
        step: int = 1,
    ) -> None:
        if len(tokens) != len(seconds) or len(tokens) < 2:
            raise ValueError(f"expected two columns of at least 2 rows, found {len(tokens)} and {len(seconds)}")
        for column in (tokens, seconds):
            if any(later <= earlier for earlier, later in pairwise(column)):
                raise ValueError(f"expected a table that increases, found {list(column)}")
        if not 1 <= smallest <= largest:
            raise ValueError(f"expected 1 <= smallest <= largest, found {smallest} and {largest}")
        if step < 1:
            raise ValueError(f"expected a step of at least 1, found {step}")
        self.goal, self.smallest, self.largest, self.step = goal, smallest, largest, step
        self._tokens, self._seconds = list(tokens), list(seconds)

    def seconds(self, tokens: int) -> float:
        """T(tokens)."""
        return interpolate(self._tokens, self._seconds, tokens)

    def allowance(self, decodes: int) -> int:
        """As `ChunkPolicy.allowance`: bisection over the rows of the table, then the line between two."""
        chunk = self._largest_within(decodes)
        return max(chunk - chunk % self.step, self.smallest)

    def _largest_within(self, decodes: int) -> int:
        left = self.goal - self.seconds(decodes)
        if self.seconds(self.largest) <= left:
            return self.largest
        x, y = self._tokens, self._seconds
        i = min(max(bisect_right(y, left), 1), len(y) - 1)
        chunk = x[i - 1] + int((left - y[i - 1]) * (x[i] - x[i - 1]) / (y[i] - y[i - 1]))
        chunk = min(max(chunk, self.smallest), self.largest)
        # Rounding may have put it one off: T itself decides.
        while chunk > self.smallest and self.seconds(chunk) > left:
            chunk -= 1
        while chunk < self.largest and self.seconds(chunk + 1) <= left:
            chunk += 1
        return chunk
