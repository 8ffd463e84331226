"""The sampling parameters of a step's rows, as arrays that are kept while the rows stay the same."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from kernels.sampling.parameters import signed_seed
from live.generation import Generation
from live.graphs.staging import Arrays


class SamplingBatch:
    """The sampling parameters of several generations, one row each.

    Attributes:
        greedy: every row takes the most likely token. filtered: some row excludes tokens.
    """

    def __init__(self, generations: Many[Generation]) -> None:
        rows = [generation.sampling_params for generation in generations]
        self.greedy = all(row.temperature == 0 for row in rows)
        self.filtered = any(row.filters for row in rows)
        self._rows = rows
        self._columns: Arrays = {}

    def columns(self) -> Arrays:
        """The fields of `SamplingMetadata` but for the positions; made on the first call."""
        rows = self._rows
        if not self._columns:
            self._columns = {
                "temperature": np.array([row.temperature for row in rows]),
                "top_p": np.array([row.top_p for row in rows]),
                "min_p": np.array([row.min_p for row in rows]),
                "top_k": np.array([row.top_k for row in rows]),
                "seeds": np.array([signed_seed(row.seed) for row in rows], dtype=np.int64),
            }
        return self._columns
