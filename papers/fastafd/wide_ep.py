"""vLLM with data-parallel attention and experts over all N GPUs (DP = EP), and its KV ceiling.

No microbatches alternate, so the stages of a layer follow each other on every GPU: the attention stage and the rows of
the bundle, E/N experts, one message to each of the other GPUs, the way there and back, and a fixed overhead of a layer
that is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from latency_models.deployment.roofline import Deployment, footprint
from papers.fastafd.measurements import TRAY, SystemMeasurement
from papers.fastafd.stages import KV_BYTES, PRECISION, BundleParameters, LayerStages

UTILIZATION = 0.9
"""vLLM's gpu_memory_utilization."""

RESERVE = 4e9
"""Bytes of activations, CUDA graphs and communication buffers on a GPU, assumed. With them the predicted ceilings of
8,192-token prompts are vLLM's reported ones to one sequence."""


@dataclass(frozen=True, slots=True)
class WideEp:
    """A wide-EP system, predicted with a bundle's parameters and one number of its own.

    Attributes:
        overhead: seconds of a layer beside the stages.
    """

    stages: LayerStages
    parameters: BundleParameters
    overhead: float = 0.0

    def tpot(self, gpus: int, prompt_tokens: int, batch_size: int) -> float:
        """Seconds of a decode step with `batch_size` sequences on each of `gpus`."""
        tokens = gpus * batch_size
        stages, fitted = self.stages, self.parameters
        layer = (
            stages.attention(fitted, batch_size, prompt_tokens)
            + stages.expert_read(tokens, gpus)
            + stages.rows(tokens, gpus, fitted.row_efficiency)
            + fitted.tray_seconds / TRAY * (gpus - 1)
            + fitted.exchange_seconds
            + self.overhead
        )
        return layer * stages.model.layers

    def kv_ceiling(self, gpus: int, prompt_tokens: int) -> int:
        """Sequences of so many tokens that the KV cache of one GPU holds."""
        memory = footprint(self.stages.model, Deployment(ffn_cards=gpus, precision=PRECISION, kv_bytes=KV_BYTES))
        # A checkpoint in 8 bits keeps embeddings and output head in 16.
        weights = memory.attention_weights + memory.ffn_weights + self.stages.model.embedding_parameters
        free = self.stages.hardware.memory_capacity * UTILIZATION - weights - RESERVE
        return max(int(free / memory.kv_bytes_per_token / prompt_tokens), 0)


def fit_overhead(stages: LayerStages, parameters: BundleParameters, measured: Sequence[SystemMeasurement]) -> float:
    """Seconds of a layer that measured steps of wide EP take beyond the stages, on average."""
    bare = WideEp(stages, parameters)
    missing = [row.tpot - bare.tpot(row.gpus, row.prompt_tokens, row.batch_size) for row in measured]
    return fmean(missing) / stages.model.layers
