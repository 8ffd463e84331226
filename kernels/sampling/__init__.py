"""Chooses the next token of each row of logits: greedy or sampled, with parameters that may differ between rows.

Tokens are sampled by inverting the cumulative distribution in the order of token ids, with one random number for each
token. That number is a function of the request's seed and the token's position, and the weights that are summed are
integers, so that no sum depends on its order: a request's tokens do not depend on the rest of the batch.
(The alternative, the largest of Gumbel-perturbed logits, needs a random number for every entry of the vocabulary.)
"""

from __future__ import annotations

import torch

from kernels.sampling import reference
from kernels.sampling.parameters import SamplingMetadata, SamplingParams

__all__ = ["SamplingMetadata", "SamplingParams", "sample", "top_logprobs"]


def sample(logits: torch.Tensor, parameters: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.sample`; on CUDA by two kernels if all rows are greedy, else by three."""
    if logits.is_cuda:
        from kernels.sampling import triton

        return triton.sample(logits.contiguous(), parameters)
    return reference.sample(logits, parameters)


def top_logprobs(logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.top_logprobs`, by PyTorch's own selection on every device, since few requests use it."""
    return reference.top_logprobs(logits, n)
