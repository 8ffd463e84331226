"""Step times on a line over the size of a batch: AFD's α/β lines for a whole colocated engine."""

from __future__ import annotations

from latency_models.step_time import StepTimeModel
from schedulers.batches import Batch


class LinearStepTime(StepTimeModel):
    """t = β + α_token · (prompt tokens + decodes) + α_kv · KV tokens read.

    Args:
        overhead: β, seconds of every step: reading the weights, and the host's share.
        per_token: α_token, seconds a row of the linear layers.
        per_kv_token: α_kv, seconds a cached token that a decode attends to.
        per_prefill_kv_token: seconds a cached token that one prompt token attends to; makes long prompts quadratic.
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
        """See `StepTime.decode_seconds`."""
        fixed, slope = self.overhead + self.per_token * decodes, self.per_kv_token
        return [fixed + slope * tokens for tokens in range(kv, kv + decodes * steps, decodes)]


def attended(batch: Batch) -> float:
    """Cached tokens that a batch's prompt tokens attend to, summed over prompt tokens; causal within a chunk."""
    return sum(chunk.tokens * (chunk.context + 0.5 * (chunk.tokens + 1)) for chunk in batch.chunks)
