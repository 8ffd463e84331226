"""Engine settings of the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineFlags:
    """The engine's settings on the command line; None where a flag is not given."""

    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_blocks: int | None
    kv_gib: float | None
    one_shot: bool | None
