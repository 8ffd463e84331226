"""vLLM with data-parallel attention and experts over all N GPUs (DP = EP), and its KV ceiling.

No microbatches alternate, so the stages of a layer follow each other on every GPU: the attention stage and the rows of
the bundle, E/N experts, one message to each of the other GPUs, the way there and back, and a fixed overhead of a layer
that is fitted. On the same GPUs AFD and wide EP are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from latency_models.deployment.roofline import Deployment, footprint
from papers.fastafd.measurements import TRAY, SystemMeasurement
from papers.fastafd.stages import (
    KV_BYTES,
    MICROBATCHES,
    PRECISION,
    BundleParameters,
    LayerStages,
    predict_step,
    throughput_per_gpu,
)

UTILIZATION = 0.9
"""vLLM's gpu_memory_utilization."""

RESERVE = 4e9
"""Bytes of activations, CUDA graphs and communication buffers on a GPU, assumed. With them the predicted ceilings of
8,192-token prompts are vLLM's reported ones to one sequence."""


@dataclass(frozen=True, slots=True)
class WideEp:
    """A wide-EP system, predicted with a bundle's parameters and `overhead`, seconds of a layer beside the stages."""

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


PROMPTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
GPUS = (8, 16, 24, 32, 48, 64, 72)
"""Whole trays of one NVL72 rack."""

BUNDLE_KV_TOKENS = 839_400
"""Tokens that an attention GPU of the measured bundles holds, as reported for Qwen3-235B-A22B."""

Document = dict[str, Any]


def compare_layouts(wide_ep: WideEp) -> list[Document]:
    """One entry a prompt length: both layouts at every number of GPUs, each with all sequences that its cache holds."""
    return [_compare(wide_ep, prompt) for prompt in PROMPTS]


def _compare(wide_ep: WideEp, prompt_tokens: int) -> Document:
    rows = [_at(wide_ep, prompt_tokens, gpus) for gpus in GPUS]
    best_bundle = max(rows, key=lambda row: float(row["afd"]["throughput"]))
    best_wide = max(rows, key=lambda row: float(row["wide_ep"]["throughput"]))
    ahead = [row["gpus"] for row in rows if row["gain"] > 0]
    return {
        "prompt_tokens": prompt_tokens,
        "rows": rows,
        "afd_ahead": ahead,
        "best_afd": {"gpus": best_bundle["gpus"], **best_bundle["afd"]},
        "best_wide_ep": {"gpus": best_wide["gpus"], **best_wide["wide_ep"]},
        "gain_of_best": best_bundle["afd"]["throughput"] / best_wide["wide_ep"]["throughput"] - 1,
    }


def _at(wide_ep: WideEp, prompt_tokens: int, gpus: int) -> Document:
    """Both layouts on this many GPUs: a bundle of one FFN tray, and vLLM over all."""
    ratio = gpus // TRAY - 1
    bundle_batch = max(BUNDLE_KV_TOKENS // prompt_tokens // MICROBATCHES * MICROBATCHES, 1)
    bundle = predict_step(wide_ep.stages, wide_ep.parameters, prompt_tokens, bundle_batch, ratio).tpot
    batch = max(wide_ep.kv_ceiling(gpus, prompt_tokens), 1)
    wide = wide_ep.tpot(gpus, prompt_tokens, batch)
    afd = {"ratio": ratio, "batch_size": bundle_batch, "tpot_ms": 1e3 * bundle}
    afd["throughput"] = throughput_per_gpu(bundle_batch, ratio, bundle)
    wide_ep_row = {"batch_size": batch, "tpot_ms": 1e3 * wide, "throughput": batch / wide}
    return {"gpus": gpus, "afd": afd, "wide_ep": wide_ep_row, "gain": afd["throughput"] / wide_ep_row["throughput"] - 1}
