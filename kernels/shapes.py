"""The model sizes that kernels are called with, as in a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama or Qwen3 family.

    Attributes:
        experts, experts_per_token, expert_intermediate: of a mixture of experts; 0 in a dense model.
        qk_norm: queries and keys are normalised head by head.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    qk_norm: bool = False
    epsilon: float = 1e-6
    rope_theta: float = 10000.0

    def heads_sizes(self) -> dict[str, int]:
        """The sizes that benchmark cases of attention have in common."""
        return {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}

    def linear(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the linear layers of one dense decoder layer, by type."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (query + 2 * key, self.hidden),
            "o": (self.hidden, query),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
