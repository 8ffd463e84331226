"""How likely a model finds tokens, for requests that ask: those it gave, the likeliest beside them, a prompt's own."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from kernels.sampling import top_logprobs
from live.generation import Generation, Likely
from live.models.decoder import Decoder

ROWS = 256
"""Of a prompt that are taken together: their logits are what takes memory, 4 bytes · vocabulary each."""


@dataclass(frozen=True)
class Told:
    """What one step tells of a request.

    Attributes:
        begin: the position of the first of these prompt tokens; -1: it is the token that was given.
    """

    generation: Generation
    begin: int
    logprobs: list[float]
    tops: list[Likely]

    def write(self) -> None:
        """Where the request keeps it; a prompt's tokens in their places, also when they are computed again."""
        generation = self.generation
        if self.begin < 0:
            generation.logprobs += self.logprobs
            generation.tops += self.tops
            return
        if not generation.prompt_logprobs:
            generation.prompt_logprobs = [None] * len(generation.prompt)
            generation.prompt_tops = [[] for _ in generation.prompt]
        end = self.begin + len(self.logprobs)
        generation.prompt_logprobs[self.begin : end] = self.logprobs
        generation.prompt_tops[self.begin : end] = self.tops


def of_given(generations: Many[Generation], logits: torch.Tensor, logprobs: torch.Tensor) -> list[Told]:
    """Of the tokens just drawn, for those who ask. `logprobs`: (rows,), as the sampler gave them."""
    asking = [i for i, each in enumerate(generations) if each.top >= 0]
    if not asking:
        return []
    known = logprobs[asking].tolist()
    tops = _likeliest(logits[asking], max(generations[i].top for i in asking))
    return [Told(generations[i], -1, [known[j]], [tops[j][: generations[i].top]]) for j, i in enumerate(asking)]


def of_prompt(decoder: Decoder, hidden: torch.Tensor, generation: Generation, context: int) -> Told:
    """Of the tokens that follow on those of a prompt chunk.

    Args:
        hidden: (chunk's tokens, hidden), before the final norm. context: the position of the first of them.
    """
    targets = torch.from_numpy(generation.prompt[context + 1 : context + 1 + len(hidden)]).to(hidden.device)
    logprobs: list[float] = []
    tops: list[Likely] = []
    for begin in range(0, len(targets), ROWS):
        part = targets[begin : begin + ROWS]
        logits = decoder.logits(decoder.normed(hidden[begin : begin + len(part)])).float()
        chosen = logits.gather(1, part[:, None])[:, 0]
        logprobs += (chosen - logits.logsumexp(dim=-1)).tolist()
        tops += _likeliest(logits, generation.prompt_top)
    return Told(generation, context + 1, logprobs, tops)


def _likeliest(logits: torch.Tensor, n: int) -> list[Likely]:
    if n == 0:
        return [[] for _ in range(len(logits))]
    tokens, values = top_logprobs(logits, min(n, logits.shape[-1]))
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
