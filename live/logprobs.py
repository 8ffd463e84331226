"""Log-probabilities for requests that want them: of output tokens, of the most likely tokens, of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from kernels.sampling import top_logprobs
from live.generation import Generation, TopLogprobs
from live.models.decoder import Decoder

CHUNK_ROWS = 256
"""Prompt tokens whose logits are computed together. Each row of logits takes 4 bytes · vocabulary."""


@dataclass(frozen=True)
class LogprobsResult:
    """The log-probabilities of one request's tokens in one step; `position`: of the first prompt token, -1: output."""

    generation: Generation
    position: int
    token_logprobs: list[float]
    top_logprobs: list[TopLogprobs]

    def store(self) -> None:
        """Append to the generation's output tokens, or fill in prompt positions, which a preemption may recompute."""
        generation = self.generation
        if self.position < 0:
            generation.token_logprobs += self.token_logprobs
            generation.top_logprobs += self.top_logprobs
            return
        if not generation.prompt_token_logprobs:
            generation.prompt_token_logprobs = [None] * len(generation.prompt)
            generation.prompt_top_logprobs = [[] for _ in generation.prompt]
        end = self.position + len(self.token_logprobs)
        generation.prompt_token_logprobs[self.position : end] = self.token_logprobs
        generation.prompt_top_logprobs[self.position : end] = self.top_logprobs


def sampled_logprobs(
    generations: Many[Generation], logits: torch.Tensor, logprobs: torch.Tensor
) -> list[LogprobsResult]:
    """The results of the tokens just sampled, where wanted; logits (rows, vocabulary), logprobs (rows,)."""
    rows = [i for i, generation in enumerate(generations) if generation.logprobs >= 0]
    if not rows:
        return []
    sampled = logprobs[rows].tolist()
    tops = _top_logprobs(logits[rows], max(generations[i].logprobs for i in rows))
    return [
        LogprobsResult(generations[i], -1, [sampled[j]], [tops[j][: generations[i].logprobs]])
        for j, i in enumerate(rows)
    ]


def prompt_chunk_logprobs(
    decoder: Decoder, hidden: torch.Tensor, generation: Generation, context: int
) -> LogprobsResult:
    """The log-probabilities of the tokens that follow a chunk's; `hidden`: (chunk tokens, hidden), not normed."""
    targets = torch.from_numpy(generation.prompt[context + 1 : context + 1 + len(hidden)]).to(hidden.device)
    logprobs: list[float] = []
    tops: list[TopLogprobs] = []
    for begin in range(0, len(targets), CHUNK_ROWS):
        part = targets[begin : begin + CHUNK_ROWS]
        logits = decoder.logits(decoder.normed(hidden[begin : begin + len(part)])).float()
        logit = logits.gather(1, part[:, None])[:, 0]
        logprobs += (logit - logits.logsumexp(dim=-1)).tolist()
        tops += _top_logprobs(logits, generation.prompt_logprobs)
    return LogprobsResult(generation, context + 1, logprobs, tops)


def _top_logprobs(logits: torch.Tensor, n: int) -> list[TopLogprobs]:
    if n == 0:
        return [[] for _ in range(len(logits))]
    tokens, values = top_logprobs(logits, min(n, logits.shape[-1]))
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
