"""The sizes of a bundle, the ranks of its workers, and the forms of their messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from live.backend import BackendLimits
from live.models.config import ModelConfig
from live.topologies.requests import request_payloads, token_payloads
from live.topologies.transport import COMMON_FORMS, Form, Forms, Payload
from schedulers.engine_config import EngineConfig

COMMAND, RESULT, ROWS, OUTPUT = range(2, 6)
"""Kinds of messages.

COMMAND, coordinator to attention: microbatches to start (a bit each), requests that enter slots, ids to abort.
RESULT, attention to coordinator: the microbatch whose step has ended, free KV blocks, preemptions; its new tokens.
ROWS, attention to FFN: microbatch and layer; the rows of an FFN stage (`live.models.decoder.FFNRows`).
OUTPUT, FFN to attention: microbatch and layer; the FFN's output for those rows.
"""

COORDINATOR = 0
"""The coordinator's rank."""


@dataclass(frozen=True)
class BundleLayout:
    """x attention and y FFN instances, m microbatches in flight; `engine`: settings of one microbatch of one."""

    attention_instances: int
    ffn_instances: int
    microbatches: int
    engine: EngineConfig

    @property
    def batch_size(self) -> int:
        """B, slots of one attention instance in one microbatch."""
        return self.engine.max_num_seqs

    @property
    def attention_ranks(self) -> range:
        """Ranks of the attention workers."""
        return range(1, 1 + self.attention_instances)

    @property
    def ffn_ranks(self) -> range:
        """Ranks of the FFN workers."""
        first = 1 + self.attention_instances
        return range(first, first + self.ffn_instances)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 + self.attention_instances + self.ffn_instances

    @property
    def names(self) -> list[str]:
        """A name for each rank, such as "attention 0"."""
        instances = (("attention", self.attention_instances), ("ffn", self.ffn_instances))
        return ["coordinator", *(f"{role} {i}" for role, count in instances for i in range(count))]

    def shares(self, rows: int, instance: int, microbatch: int) -> list[int]:
        """Consecutive rows for each FFN instance, as many but for one; instances begin apart to spread larger ones."""
        share, remainder = divmod(rows, self.ffn_instances)
        start = instance + microbatch
        return [share + ((i - start) % self.ffn_instances < remainder) for i in range(self.ffn_instances)]

    def limits(self, config: ModelConfig) -> BackendLimits:
        """The sizes that limit requests."""
        engine, parts = self.engine, self.attention_instances * self.microbatches
        return BackendLimits(
            min(config.max_position_embeddings, engine.num_gpu_blocks * engine.block_size),
            parts * self.batch_size,
            parts * engine.num_gpu_blocks,
            engine.block_size,
            engine.prefix_id_tokens,
        )

    def forms(self, config: ModelConfig, dtype: torch.dtype) -> Forms:
        """The forms of the messages. Buffers have these sizes from the start: no step needs larger ones."""
        shape, rows, slots = config.shape, self.engine.max_num_batched_tokens, self.batch_size * self.microbatches
        longest = self.limits(config).max_model_len
        experts = (shape.experts_per_token,)
        routed = (
            Payload(torch.float32, rows, experts, on_device=True),
            Payload(torch.int32, rows, experts, on_device=True),
        )
        hidden = Payload(dtype, rows, (shape.hidden,), on_device=True)
        leaving = Payload(torch.int64, 2 * slots * self.attention_instances)  # each worker gets those of all
        return {
            **COMMON_FORMS,
            COMMAND: Form(1, (*request_payloads(slots, longest, longest // self.engine.prefix_id_tokens), leaving)),
            RESULT: Form(3, token_payloads(self.batch_size)),
            ROWS: Form(2, (hidden, *routed) if shape.experts else (hidden,)),
            OUTPUT: Form(2, (hidden,)),
        }
