"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random numbers from a counter."""

from __future__ import annotations

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF


def random_words(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """32 random bits for each (seed, position): the first word of Philox with key `seed`, counter (position, 0, 0, 0).

    Args:
        seeds, positions: (rows,) int64; of the positions, the low 32 bits count.

    Returns:
        (rows,) int64 from 0 to 2³² − 1, the same on every device.
    """
    zero = torch.zeros_like(seeds)
    even, odd = torch.stack([positions & WORD, zero]), torch.zeros(2, *seeds.shape, dtype=torch.int64).to(seeds.device)
    return philox(even, odd, torch.stack([seeds & WORD, (seeds >> 32) & WORD]))[0][0]


def philox(even: torch.Tensor, odd: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bijection itself.

    Args:
        even: (2, rows), words 0 and 2 of the counters. odd: words 1 and 3. key: (2, rows), the low and the high word.
            All int64, each entry of 32 bits. A product of two of them overflows int64, which keeps its 64 bits.

    Returns:
        The words of the result in the same order.
    """
    multipliers = torch.tensor(MULTIPLIERS, device=key.device)[:, None]
    weyl = torch.tensor(WEYL, device=key.device)[:, None]
    for _ in range(ROUNDS):
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) & WORD) ^ odd ^ key, product & WORD
        key = (key + weyl) & WORD
    return even, odd
