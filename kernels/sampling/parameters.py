"""Sampling parameters, of one request and of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    Attributes:
        temperature: 0 takes the most likely token; of equally likely ones the token with the lowest id.
        top_k: keep the k most likely tokens, with all that are as likely as the last of them; 0 keeps every token.
        top_p: of these, keep the smallest set with this share of their probability, with all that are as likely as the
            last of them.
        min_p: before both, keep only tokens at least this share as likely as the most likely one; 0 keeps every token.
        seed: 64 bits. The random number for a token depends on the seed and on the token's position only.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def filters(self) -> bool:
        """True if some tokens are excluded before sampling."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class SamplingMetadata:
    """The sampling parameters of a batch: one entry for each row, on the device of the logits.

    Attributes:
        temperature, top_p, min_p: (rows,) float32. top_k: (rows,) int32.
        seeds: (rows,) int64, the 64 bits of each seed. positions: (rows,) int64, of the tokens to be sampled.
        greedy: every row has temperature 0. filtered: some row excludes tokens. Both are known on the host, so that a
            launch does not wait for the device. `greedy` False and `filtered` True are always correct, and slower.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    greedy: bool
    filtered: bool

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], positions: Sequence[int], device: str | torch.device = "cpu"
    ) -> SamplingMetadata:
        """The parameters of several requests, each with the position of its next token."""
        real = [[row.temperature for row in rows], [row.top_p for row in rows], [row.min_p for row in rows]]
        temperature, top_p, min_p = torch.tensor(real, dtype=torch.float32).to(device)
        signed = [signed_seed(row.seed) for row in rows]
        seeds, places, top_k = torch.tensor([signed, list(positions), [row.top_k for row in rows]]).to(device)
        return cls(
            temperature,
            top_k.int(),
            top_p,
            min_p,
            seeds,
            places,
            greedy=all(row.temperature == 0 for row in rows),
            filtered=any(row.filters for row in rows),
        )


def signed_seed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
