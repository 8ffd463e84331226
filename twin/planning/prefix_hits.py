"""Hits in the prefix caches of engines, expected from a sample of the requests: how many, and how soon.

A block hits if its last use is not so long ago that a cache has evicted it, which drops what was used least recently.
Within w requests a cache sees Σ_{j<w} a·P(D > j) distinct blocks, where D is the distance of two uses of a block in
requests and a the blocks of a request (the footprint of working-set theory). It is full after as many requests as that
equals its capacity, and blocks of smaller distances hit. This also says when caches that begin empty are warm: later
requests find what they would have found in a cache that had served for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.mixes import SharedPrefixes
from workloads.request import Request

WARM_HITS = 0.999
"""Share of the hits of a warm cache that one which began empty has when it counts as warm."""


@dataclass(frozen=True)
class PrefixHits:
    """Reuse of prompt blocks in a sample of requests.

    Attributes:
        cacheable: tokens of each prompt that a cache of any size can supply.
        distances: requests between a use of a block and the one before, of all blocks that are looked up, ascending;
            infinite for the first use. tokens: of a block. requests: in the sample.
    """

    cacheable: NDArray[np.int64]
    distances: NDArray[np.float64]
    tokens: int
    requests: int

    def share(self, blocks: float) -> float:
        """The part of `cacheable` that a cache of this many blocks is expected to supply."""
        return min(len(self._hits(blocks)) * self.tokens / max(int(self.cacheable.sum()), 1), 1.0)

    def settled(self, blocks: float) -> float:
        """Requests of one engine after which its cache of this many blocks is warm."""
        hits = self._hits(blocks)
        return float(hits[int(WARM_HITS * (len(hits) - 1))]) if len(hits) else 0.0

    def _hits(self, blocks: float) -> NDArray[np.float64]:
        """The distances of the blocks that hit."""
        places = np.searchsorted(self.distances, np.arange(self.requests), side="right")
        footprint = np.cumsum(len(self.distances) - places) / self.requests
        full = np.searchsorted(footprint, blocks, side="right")
        return self.distances[: np.searchsorted(self.distances, full, side="right")] if full < self.requests else (
            self.distances[np.isfinite(self.distances)]
        )  # fmt: skip


def prefix_hits(requests: Sequence[Request], tokens: int, shared: SharedPrefixes | None) -> PrefixHits | None:
    """The reuse in a sample; None if no request has a block that another one may have.

    Args:
        tokens: of a block. shared: the beginnings that prompts may have beside those in the sample.
    """
    numbers: dict[tuple[int, int], int] = {}
    latest: list[int] = []  # by block: the request that used it last
    distances: list[float] = []
    paths: list[list[int]] = []
    for index, request in enumerate(requests):
        path, blocks = -1, []
        for key in request.prefix_blocks[: max(request.prompt_tokens - 1, 0) // tokens]:
            path = numbers.setdefault((path, key), len(numbers))  # the same id after another path is another block
            if path == len(latest):
                latest.append(index)
                distances.append(np.inf)
            else:
                distances.append(index - latest[path])
                latest[path] = index
            blocks.append(path)
        paths.append(blocks)
    uses = np.bincount([block for blocks in paths for block in blocks], minlength=len(latest))
    num_shared = 0 if shared is None else shared.shared_blocks
    cacheable = np.array(
        [
            max(int((uses[blocks] > 1).sum()), min(len(blocks), num_shared)) * tokens if blocks else 0
            for blocks in paths
        ],
        dtype=np.int64,
    )
    return PrefixHits(cacheable, np.sort(np.array(distances)), tokens, len(paths)) if cacheable.any() else None
