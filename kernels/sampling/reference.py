"""The mathematics of sampling, with random numbers from a counter.

These are Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

import torch

from kernels.sampling.parameters import SamplingMetadata

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


ONE = 2.0**35
"""The weight of the most likely token. A quarter of a million times as much is below 2⁵³, where float64 is exact."""


def sample(logits: torch.Tensor, parameters: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of each row, and its log-probability.

    A token's weight is ⌊2³⁵ · exp(x − max x)⌋ with x = logit / temperature, and 0 if it is excluded. W being their sum
    and u = (32 random bits) / 2³², the token is the first in the order of ids up to which the weights sum to more than
    ⌊u · W⌋.

    Args:
        logits: (rows, vocabulary), float; computed in float32, or in their own type if that is wider. −∞ excludes.

    Returns:
        Token ids, (rows,) int64. Log-probabilities of the model, that is before temperature and exclusions, (rows,)
        float32.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = wide.argmax(dim=-1)
    if not parameters.greedy:
        tokens = torch.where(parameters.temperature > 0, _drawn(wide, parameters), tokens)
    logit = wide.gather(1, tokens[:, None])[:, 0]
    return tokens, (logit - wide.logsumexp(dim=-1)).float()


def _drawn(logits: torch.Tensor, parameters: SamplingMetadata) -> torch.Tensor:
    temperature = parameters.temperature[:, None].to(logits.dtype)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)
    weights = whole_weights(scaled)
    if parameters.filtered:
        weights = torch.where(scaled >= least_kept(scaled, weights, parameters), weights, 0)
    through = weights.cumsum(dim=-1)
    uniform = random_words(parameters.seeds, parameters.positions).double() / 2**32
    target = (uniform * through[:, -1].double()).long()
    tokens = torch.searchsorted(through, target[:, None], right=True)[:, 0]
    return tokens.clamp(max=logits.shape[-1] - 1)  # a row of nothing but −∞, or with NaN, has no token; some id then


def whole_weights(scaled: torch.Tensor) -> torch.Tensor:
    """⌊2³⁵ · exp(x − max x)⌋, (rows, vocabulary) int64."""
    return ((scaled - scaled.amax(dim=-1, keepdim=True)).exp() * ONE).long()


def least_kept(scaled: torch.Tensor, weights: torch.Tensor, parameters: SamplingMetadata) -> torch.Tensor:
    """The smallest x that is not excluded, (rows, 1): by min_p, then by top_k, then by top_p of what they leave."""
    threshold = scaled.amax(dim=-1, keepdim=True) + parameters.min_p[:, None].to(scaled.dtype).log()
    ordered, order = scaled.sort(dim=-1, descending=True)
    last = torch.where(parameters.top_k > 0, parameters.top_k, scaled.shape[-1]).long()
    last = last.clamp(max=scaled.shape[-1])[:, None] - 1
    threshold = torch.maximum(threshold, ordered.gather(1, last))
    through = torch.where(ordered >= threshold, weights.gather(1, order), 0).cumsum(dim=-1)
    share = parameters.top_p[:, None].double()
    target = torch.where(share < 1, (share * through[:, -1:].double()).ceil().long().clamp(min=1), 0)
    last = torch.searchsorted(through, target).clamp(max=scaled.shape[-1] - 1)
    return torch.where(share < 1, torch.maximum(threshold, ordered.gather(1, last)), threshold)


def top_logprobs(logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The n most likely tokens of each row, the most likely first, by PyTorch on every device: few requests use it.

    Returns:
        Ids, (rows, n) int64. Log-probabilities of the model, (rows, n) float32.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    values, tokens = wide.topk(n, dim=-1)
    return tokens, (values - wide.logsumexp(dim=-1, keepdim=True)).float()
