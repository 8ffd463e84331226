"""What an engine is set to. The defaults are vLLM V1's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from schedulers.waiting import ORDERS

Reserve = Literal["chunk", "prompt", "answer"]
"""How many blocks admission wants: for the first chunk, for the whole prompt, or for the answer up to its limit too."""

Share = Literal["scheduled", "computed"]
"""When a prompt block can be shared: once its step is scheduled (vLLM), or once it has been computed (Prelude)."""


@dataclass(frozen=True, slots=True)
class OneShotBudget:
    """What one-shot work may take of a step (Prelude 3). It holds no decode slot and no cache beyond the step.

    Attributes:
        tokens: prompt tokens a step. sequences: prompts a step.
        activation_bytes: temporary memory a step; `bytes_per_token` is what a prompt token takes of it.

    Raises:
        ValueError: budgets under which no prompt could ever run.
    """

    tokens: int = 8192
    sequences: int = 256
    activation_bytes: float = float("inf")
    bytes_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"one_shot.{name}: expected at least 1, found {getattr(self, name)}")
        if self.bytes_per_token < 0:
            raise ValueError(f"one_shot.bytes_per_token: expected 0 or more, found {self.bytes_per_token}")
        if self.most_tokens() < 1:
            raise ValueError(
                f"one_shot.activation_bytes: expected room for a token, which takes bytes_per_token "
                f"({self.bytes_per_token:g}), found {self.activation_bytes:g}"
            )

    def most_tokens(self) -> int:
        """Prompt tokens a step that both budgets permit."""
        if not self.bytes_per_token:
            return self.tokens
        return int(min(self.tokens, self.activation_bytes // self.bytes_per_token))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        kv_blocks, block_tokens: KV memory: how many blocks of how many tokens.
        max_num_batched_tokens: rows a step, prompt tokens and decodes together. max_num_seqs: sequences that run at
            once.
        max_table_blocks: block-table entries of all running sequences together, 0 for no limit.
        prefix_caching: whether prompt blocks are shared and remembered. prefix_id_tokens: prompt tokens that one id of
            a request's `prefix_blocks` stands for, a multiple of `block_tokens`.
        share: when a prompt block can be shared.
        lead_cold_prefixes: of waiting requests with the same uncached prefix one leads, its peers wait a step (Prelude
            3).
        order: who waits ahead of whom: fcfs, priority or shortest_prompt.
        reserve: how many blocks admission wants.
        one_shot: a budget of its own for one-shot work; None sends it down the decode-shaped path like everything else.

    Raises:
        ValueError: settings that contradict each other.
    """

    kv_blocks: int
    block_tokens: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_table_blocks: int = 0
    prefix_caching: bool = True
    prefix_id_tokens: int = 16
    share: Share = "scheduled"
    lead_cold_prefixes: bool = False
    order: str = "fcfs"
    reserve: Reserve = "chunk"
    one_shot: OneShotBudget | None = None

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "block_tokens", "max_num_batched_tokens", "max_num_seqs", "prefix_id_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.max_table_blocks < 0:
            raise ValueError(f"max_table_blocks: expected 0 (no limit) or more, found {self.max_table_blocks}")
        for name, choices in (("order", tuple(ORDERS)), ("share", get_args(Share)), ("reserve", get_args(Reserve))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, found {getattr(self, name)!r}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens: expected at least max_num_seqs ({self.max_num_seqs}), since every running "
                f"sequence gets a token a step, found {self.max_num_batched_tokens}"
            )
        if self.prefix_id_tokens % self.block_tokens:
            raise ValueError(
                f"prefix_id_tokens: expected a multiple of block_tokens ({self.block_tokens}), "
                f"found {self.prefix_id_tokens}"
            )
        if self.lead_cold_prefixes and self.share != "computed":
            raise ValueError(
                f"lead_cold_prefixes: expected share computed, where a prefix can be cold twice in a step, "
                f"found share {self.share}"
            )
