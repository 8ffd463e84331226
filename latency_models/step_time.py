"""How long one engine step takes: what the twin asks, and the α/β line that answers for a whole engine.

`StepTime` is the one seam between a plant that simulates and what is known of the hardware. Whoever implements it
answers twice, to the last bit alike: for one batch, and for a run of decode steps between which nobody joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from schedulers.batches import Batch
from schedulers.lockstep import GroupBatch


class StepTime(Protocol):
    """Seconds of a step."""

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds."""
        ...

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """Durations of `steps` successive decode steps of the same `decodes` sequences.

        `kv` and `longest` are `decode_kv` and `longest_decode` of the first; from step to step the one grows by
        `decodes`, the other by 1. Equal to asking `seconds` for each.
        """
        ...


class GroupStepTime(Protocol):
    """A step-time model that knows what data-parallel ranks share: the experts of a step see the tokens of all
    ranks."""

    def rank_seconds(self, batch: Batch | None, gathered: int) -> float:
        """Seconds of one rank's step, when all ranks together have `gathered` rows. None: the rank is idle."""
        ...

    def rank_decode_seconds(self, decodes: int, kv: int, longest: int, gathered: int, steps: int) -> list[float]:
        """As `StepTime.decode_seconds`, of one rank (0 decodes: idle); equal to asking `rank_seconds` for each."""
        ...


def group_seconds(model: StepTime, batch: GroupBatch) -> float:
    """Duration of a step that data-parallel ranks take together: the slowest rank's.

    A model without `rank_seconds` has nothing that ranks share, and idle ranks take no time.
    """
    ranks = batch.ranks
    if hasattr(model, "rank_seconds"):
        group = cast(GroupStepTime, model)
        return max(group.rank_seconds(rank, batch.tokens) for rank in ranks)
    return max(model.seconds(rank) for rank in ranks if rank is not None)


def group_decode_seconds(model: StepTime, runs: Sequence[tuple[int, int, int]], steps: int) -> list[float]:
    """`group_seconds` of successive decode steps; `runs` has each rank's decodes, KV tokens and longest."""
    gathered = sum(decodes for decodes, _, _ in runs)
    if hasattr(model, "rank_seconds"):
        group = cast(GroupStepTime, model)
        each = [group.rank_decode_seconds(*run, gathered, steps) for run in runs]
    else:
        each = [model.decode_seconds(*run, steps) for run in runs if run[0]]
    return [max(durations) for durations in zip(*each, strict=True)]


class LinearStepTime:
    """t = β + α_token · (prompt tokens + decodes) + α_kv · KV tokens read: AFD's α/β lines for a colocated engine.

    Args:
        overhead: β, seconds of a step whatever its batch: reading the weights, and the host's share.
        per_token: α_token, seconds a row of the linear layers.
        per_kv_token: α_kv, seconds a cached token that a decode attends to.
        per_prefill_kv_token: seconds a cached token that one prompt token attends to: long prompts are quadratic.
    """

    def __init__(
        self, overhead: float, per_token: float, per_kv_token: float = 0.0, per_prefill_kv_token: float = 0.0
    ) -> None:
        self.overhead, self.per_token = overhead, per_token
        self.per_kv_token, self.per_prefill_kv_token = per_kv_token, per_prefill_kv_token

    def seconds(self, batch: Batch) -> float:
        """Duration of one step, seconds."""
        duration = self.overhead + self.per_token * batch.n_decodes + self.per_kv_token * batch.decode_kv
        if batch.chunks:
            duration += self.per_token * batch.prefill_tokens
            if self.per_prefill_kv_token:
                duration += self.per_prefill_kv_token * attended(batch)
        return duration

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        """As `StepTime.decode_seconds`."""
        fixed, slope = self.overhead + self.per_token * decodes, self.per_kv_token
        return [fixed + slope * tokens for tokens in range(kv, kv + decodes * steps, decodes)]


def attended(batch: Batch) -> float:
    """Cached tokens that the prompt tokens of a batch attend to, summed over prompt tokens (half a chunk is causal)."""
    return sum(chunk.tokens * (chunk.context + 0.5 * (chunk.tokens + 1)) for chunk in batch.chunks)
