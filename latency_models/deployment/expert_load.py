"""Experts that are not used evenly: how many times the mean load the fullest rank has, without and with EPLB.

A token chooses experts by their popularity. Experts lie on ranks in an order that knows nothing of it, so that one rank
has more tokens than the mean; every other rank waits for it. EPLB counts the tokens of each expert over a period, gives
the most popular ones replicas, and packs all of them onto ranks so that these are as even as possible.
"""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from latency_models.io.builtin_files import FilePath
from latency_models.io.config_io import Strict
from latency_models.io.tables import read_columns
from workloads.errors import BadInput

Floats: TypeAlias = NDArray[np.float64]

ORDERS = 64
"""Orders of experts over which the load of the fullest rank is averaged."""


class ExpertBalancer(Strict):
    """EPLB: slots beyond one for each expert, and seconds between two rebalancings and of each."""

    replicas: NonNegativeInt = 0
    period: PositiveFloat
    cost: NonNegativeFloat = 0.0


class ExpertLoad(Strict):
    """The popularity of the routed experts of a layer; without `eplb` they stay where they are.

    It is uniform; power_law, whose density falls as x^-exponent from 1 to `ratio`; or the column `tokens` of a CSV
    file.
    """

    popularity: Literal["uniform", "power_law", "measured"] = "uniform"
    exponent: NonNegativeFloat = 1.01
    ratio: float = Field(default=1000.0, ge=1)
    path: FilePath | None = None
    eplb: ExpertBalancer | None = None

    @model_validator(mode="after")
    def _measured_has_a_file(self) -> ExpertLoad:
        if (self.popularity == "measured") != (self.path is not None):
            raise BadInput(
                "expected a file with popularity measured, and none otherwise", field="path", value=self.path
            )
        return self

    @property
    def slowdown(self) -> float:
        """Factor on all steps for the time that rebalancings take."""
        return 1.0 + self.eplb.cost / self.eplb.period if self.eplb else 1.0

    def shares(self, experts: int, base: Path = Path()) -> Floats:
        """The falling share of the tokens of each expert; `BadInput` for a file with another number of experts."""
        if self.path is not None:
            path = base / self.path
            tokens = np.array(read_columns(path).numbers("tokens", above=0.0))
            if len(tokens) != experts:
                raise BadInput(f"expected a row for each of the {experts} experts", value=len(tokens), file=path)
        elif self.popularity == "uniform":
            tokens = np.ones(experts)
        else:
            tokens = power_law(self.exponent, self.ratio, experts)
        ordered: Floats = np.sort(tokens)[::-1] / tokens.sum()
        return ordered

    def fullest(self, experts: int, ranks: int, base: Path = Path()) -> float:
        """Tokens of the fullest rank over the mean of all: 1 where they are even."""
        return fullest_rank(self.shares(experts, base), ranks, self.eplb)


def power_law(exponent: float, ratio: float, count: int) -> Floats:
    """The mid-quantiles of a density that falls as x^-exponent from 1 to `ratio`."""
    quantiles = (np.arange(count) + 0.5) / count
    power = 1.0 - exponent
    if abs(power) < 1e-9:
        values: Floats = ratio**quantiles
    else:
        values = (1.0 + quantiles * (ratio**power - 1.0)) ** (1.0 / power)
    return values


def fullest_rank(shares: Floats, ranks: int, eplb: ExpertBalancer | None = None) -> float:
    """Tokens of the fullest rank over the mean: of experts in any order, on average, or as EPLB packs them."""
    if eplb is not None:
        return ranks * max(packed(replicated(shares, eplb.replicas), ranks))
    experts = len(shares)
    slots = -(-experts // ranks)
    padded = np.concatenate([shares, np.zeros(slots * ranks - experts)])
    generator = np.random.default_rng(0)  # an average over orders, the same in every run
    loads = [generator.permutation(padded).reshape(ranks, slots).sum(axis=1).max() for _ in range(ORDERS)]
    return ranks * float(np.mean(loads))


def replicated(shares: Floats, replicas: int) -> list[float]:
    """The share of each slot, if each further one goes to the expert with the largest share a slot."""
    heap = [(-share, share, 1) for share in shares.tolist()]
    heapq.heapify(heap)
    for _ in range(replicas):
        _, share, copies = heap[0]
        heapq.heapreplace(heap, (-share / (copies + 1), share, copies + 1))
    return [share / copies for _, share, copies in heap for _ in range(copies)]


def packed(slots: list[float], ranks: int) -> list[float]:
    """The load of each rank, if slots go, the largest first, to the emptiest rank that has room."""
    room = -(-len(slots) // ranks)
    heap = [(0.0, rank, 0) for rank in range(ranks)]
    full: list[float] = []
    for share in sorted(slots, reverse=True):
        load, rank, count = heapq.heappop(heap)
        if count + 1 == room:
            full.append(load + share)
        else:
            heapq.heappush(heap, (load + share, rank, count + 1))
    return full + [load for load, _, _ in heap]
