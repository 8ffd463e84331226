"""Chooses the next token of each row of logits: greedy or sampled, with parameters that may differ between rows.

Tokens are sampled by inverting the cumulative distribution in the order of token ids, with one random number for each
token. That number is a function of the request's seed and the token's position, and the weights that are summed are
integers, so that no sum depends on its order: a request's tokens do not depend on the rest of the batch.
(The alternative, the largest of Gumbel-perturbed logits, needs a random number for every entry of the vocabulary.)
"""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.sampling import reference
from kernels.sampling.parameters import SamplingMetadata, SamplingParams
from kernels.sampling.reference import top_logprobs

__all__ = ["SamplingMetadata", "SamplingParams", "sample", "top_logprobs"]

sample = dispatched(reference.sample)
