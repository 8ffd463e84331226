"""What each row of a batch is sampled by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Wish:
    """What one request asks for.

    Attributes:
        temperature: 0 takes the likeliest token, the one with the lowest id of several.
        top_k: only the k likeliest tokens, and whatever is as likely as the last of them; 0 for all.
        top_p: of these, the fewest that hold this share of their probability, and whatever is as likely as the last.
        min_p: before both, only tokens at least this share as likely as the likeliest; 0 for all.
        seed: 64 bits. The number drawn for a token is a function of the seed and of the token's position.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded before drawing."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Parameters:
    """Of a batch, one entry a row, on the device of the logits.

    Attributes:
        temperature, top_p, min_p: float32. top_k: int32. seeds, positions: int64.
        greedy: every row has temperature 0. filtered: some row excludes tokens. Known on the host, so that no launch
            waits for the device; where they say more than is so (`greedy` False, `filtered` True), the tokens are the
            same.
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
    def of(cls, wishes: Sequence[Wish], positions: Sequence[int], device: str | torch.device = "cpu") -> Parameters:
        """One row for each wish; `positions` are those of the tokens to be drawn."""
        real = [[wish.temperature for wish in wishes], [wish.top_p for wish in wishes], [wish.min_p for wish in wishes]]
        temperature, top_p, min_p = torch.tensor(real, dtype=torch.float32).to(device)
        signed = [signed_seed(wish.seed) for wish in wishes]
        seeds, places, top_k = torch.tensor([signed, list(positions), [wish.top_k for wish in wishes]]).to(device)
        return cls(
            temperature,
            top_k.int(),
            top_p,
            min_p,
            seeds,
            places,
            greedy=all(wish.temperature == 0 for wish in wishes),
            filtered=any(wish.filters for wish in wishes),
        )


def signed_seed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return (seed + 2**63) % 2**64 - 2**63
