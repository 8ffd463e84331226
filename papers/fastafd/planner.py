"""AFD or wide EP on the same GPUs, over their number and the prompt length: which wins, by how much, where it turns."""

from __future__ import annotations

from typing import Any

from papers.fastafd.measurements import TRAY
from papers.fastafd.stages import MICROBATCHES, predict_step, throughput_per_gpu
from papers.fastafd.wide_ep import WideEp

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
