"""The forward pass of whole batches with gradients, and SUN's decomposition into two modules (section 3.1).

It computes what `live.models.decoder` computes, from the same `Weights`, for sequences of one length that lie side by
side: keys and values are tensors in autograd's graph, where the engine writes them into a paged cache.

The prefill module θ_p computes the prompt: the distribution of the first token and the prompt's KV cache (eq. 2). The
decode module θ_d computes all other tokens, with that cache (eq. 3). With θ_p = θ_d the two are the model itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention

from kernels.rms_norm.reference import rms_norm
from kernels.rope_kv_write import rope_table
from kernels.silu_mul.reference import silu_mul
from live.models.config import ModelConfig
from live.models.linear import linear
from live.models.weights import DenseFFN, Layer, Weights
from workloads.errors import BadInput

STATES_BATCH = 32
"""Sequences that `final_states` computes at a time."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all tokens so far: one pair for each layer, each (batch, kv_heads, tokens, head_dim)."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def tokens(self) -> int:
        return self.layers[0][0].shape[2]


class ForwardPass:
    """The computation of a dense decoder of the Llama or Qwen3 family, without weights."""

    def __init__(self, config: ModelConfig, device: str = "cpu") -> None:
        if config.shape.experts or config.labels:
            raise BadInput("expected a dense language model", field="model_type", value=config.family)
        self.config = config
        shape = config.shape
        self._scale = 1 / math.sqrt(shape.head_dim)
        self._cos, self._sin = rope_table(
            shape.head_dim, config.max_position_embeddings, shape.rope_theta, config.scaling, device=device
        )

    def __call__(
        self, weights: Weights, tokens: torch.Tensor, cache: KVCache | None = None
    ) -> tuple[torch.Tensor, KVCache]:
        """Logits (batch, n, vocabulary) of new tokens (batch, n) behind a cache, and the cache with them."""
        assert weights.head is not None
        hidden, layers = self.hidden(weights, tokens, cache)
        return linear(hidden, weights.head), layers

    def hidden(
        self, weights: Weights, tokens: torch.Tensor, cache: KVCache | None = None
    ) -> tuple[torch.Tensor, KVCache]:
        """The states that the head gets, (batch, n, hidden): behind the last layer and its norm. Else as a call."""
        hidden, epsilon = embedding(tokens, weights.embedding), self.config.shape.epsilon
        layers = []
        for i, layer in enumerate(weights.layers):
            attended, pair = self._attention(
                layer, rms_norm(hidden, layer.before, epsilon), cache.layers[i] if cache else None
            )
            hidden = hidden + attended
            assert isinstance(layer.ffn, DenseFFN)
            gate_up = linear(rms_norm(hidden, layer.after, epsilon), layer.ffn.gate_up)
            hidden = hidden + linear(silu_mul(gate_up), layer.ffn.down)
            layers.append(pair)
        return rms_norm(hidden, weights.norm, epsilon), KVCache(tuple(layers))

    def _attention(
        self, layer: Layer, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Attention's output (batch, n, hidden), and the layer's keys and values with those of the new tokens."""
        shape = self.config.shape
        batch, new, _ = x.shape
        before = 0 if past is None else past[0].shape[2]
        heads = linear(x, layer.qkv).view(batch, new, -1, shape.head_dim).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, shape.epsilon), rms_norm(k, layer.k_norm, shape.epsilon)
        q, k = self._rotated(q, before), self._rotated(k, before)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        group = shape.heads // shape.kv_heads
        every_k, every_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        mask = None
        if before:
            mask = torch.ones(new, before + new, dtype=torch.bool, device=x.device).tril(before)
        out = scaled_dot_product_attention(
            q, every_k, every_v, attn_mask=mask, is_causal=mask is None, scale=self._scale
        )
        return linear(out.transpose(1, 2).flatten(2), layer.o), (k, v)

    def _rotated(self, x: torch.Tensor, begin: int) -> torch.Tensor:
        """Rotate heads (batch, heads, n, head_dim) by their positions, from `begin` on, as `rope_kv_write` does."""
        rows = slice(begin, begin + x.shape[2])
        cos, sin = self._cos[rows], self._sin[rows]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@torch.no_grad()
def final_states(forward: ForwardPass, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """The states that the head gets, (sequences, n, hidden), a few sequences at a time."""
    return torch.cat([forward.hidden(weights, part)[0] for part in tokens.split(STATES_BATCH)])


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
