"""The next token of each row of logits: greedy, or drawn, with rows of one batch asking for different things.

Drawn by inverting the cumulative distribution in the order of token ids, with one random number a token. That number
is a function of the request's seed and the token's position alone, and the weights that are summed are whole numbers,
so that no sum depends on its order: a request's tokens do not depend on the batch that they were made in. (The
alternative, the largest of Gumbel-perturbed logits, needs a random number for every entry of the vocabulary.)
"""

from __future__ import annotations

import torch

from kernels.sampling import reference
from kernels.sampling.parameters import Parameters, Wish

__all__ = ["Parameters", "Wish", "sample", "top_logprobs"]


def sample(logits: torch.Tensor, parameters: Parameters) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.sample`, on CUDA by two kernels where all rows are greedy, else by three."""
    if logits.is_cuda:
        from kernels.sampling import triton

        return triton.sample(logits.contiguous(), parameters)
    return reference.sample(logits, parameters)


def top_logprobs(logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.top_logprobs`: PyTorch's own selection on every device, since it runs only for who asks."""
    return reference.top_logprobs(logits, n)
