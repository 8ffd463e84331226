"""SUN's decomposition of a decoder: a prefill module θ_p and a decode module θ_d of one architecture (section 3.1).

θ_p computes the prompt: the distribution of the first token and the prompt's KV cache (eq. 2). θ_d computes all other
tokens, with that cache (eq. 3). With θ_p = θ_d the two are the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from live.adaptation.forward import ForwardPass
from live.models.weights import Weights


@dataclass(frozen=True)
class Modules:
    """A prefill module and a decode module. `prefill`: θ_p. `decode`: θ_d."""

    forward: ForwardPass
    prefill: Weights
    decode: Weights

    def answer_logits(self, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Logits of answers (batch, n, vocabulary) after prompts: θ_p's first, then θ_d's (eq. 2 and 3)."""
        first, cache = self.forward(self.prefill, prompts)
        if answers.shape[1] == 1:
            return first[:, -1:]
        logits, _ = self.forward(self.decode, answers[:, :-1], cache)
        return torch.cat([first[:, -1:], logits], dim=1)

    def loss(self, prompts: torch.Tensor, answers: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
        """The mean negative log-likelihood of answers' tokens (eq. 6), where `counted`, (batch, n).

        A frozen θ_d passes gradients on to θ_p through the prompt's keys and values only.
        """
        logits = self.answer_logits(prompts, answers)
        if counted is None:
            return cross_entropy(logits.flatten(0, 1), answers.flatten())
        return cross_entropy(logits[counted], answers[counted])

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        """Answers of `tokens` tokens, the likeliest at each step, (batch, tokens): one prefill, then decode steps."""
        logits, cache = self.forward(self.prefill, prompts)
        answer = [logits[:, -1:].argmax(-1)]
        while len(answer) < tokens:
            logits, cache = self.forward(self.decode, answer[-1], cache)
            answer.append(logits.argmax(-1))
        return torch.cat(answer, dim=1)

    @torch.no_grad()
    def exact_match(self, prompts: torch.Tensor, answers: torch.Tensor) -> float:
        return float((self.generate(prompts, answers.shape[1]) == answers).all(dim=1).double().mean())
