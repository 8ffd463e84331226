"""How the tokens of a step are drawn, as arrays that are kept while the members stay."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kernels.sampling.parameters import signed_seed
from live.generation import Generation
from live.graphs.staging import Arrays


class Wishes:
    """Of several requests, a row each.

    Attributes:
        greedy: all take the likeliest token. filtered: some exclude tokens.
    """

    def __init__(self, generations: Many[Generation]) -> None:
        wishes = [each.wish for each in generations]
        self.greedy = all(wish.temperature == 0 for wish in wishes)
        self.filtered = any(wish.filters for wish in wishes)
        self._wishes = wishes
        self._columns: Arrays = {}

    def columns(self) -> Arrays:
        """As the fields of `Parameters`; made when they are first asked for."""
        if not self._columns:
            names = ("temperature", "top_p", "min_p", "top_k")
            self._columns = {name: np.array([getattr(wish, name) for wish in self._wishes]) for name in names}
            self._columns["seeds"] = np.array([signed_seed(wish.seed) for wish in self._wishes], dtype=np.int64)
        return self._columns
