"""The settings with which engines other than vLLM come, by the name of their scheduler.

Each is a setting of `EngineConfig` that holds for every scheduler; a scenario may state another value. What is no
setting is in `schedulers.vllm_versions`.

SGLang 0.5.9 `server_args.py`: prompts before decodes, chunks of 8,192 tokens (80 GB of memory), at most 16,384 prompt
tokens a step, pages of one token, and the overlap scheduler. TensorRT-LLM 1.3 `llmapi/llm_args.py`: blocks of 32
tokens, 8,192 tokens a step, whole prompts, no eviction of what runs, and the overlap scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SGLANG: Final[dict[str, Any]] = {
    "block_size": 1,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 2048,
    "max_prefill_tokens": 16384,
    "enable_mixed_chunk": False,
    "cache_blocks_on": "computed",
    "preemption_policy": "fewest_outputs",
    "capacity_scheduler_policy": "new_token_ratio",
    "async_scheduling": True,
}

TENSORRT_LLM: Final[dict[str, Any]] = {
    "block_size": 32,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 2048,
    "enable_chunked_prefill": False,
    "context_chunking_policy": "first_come_first_served",
    "cache_blocks_on": "computed",
    "in_batch_prefix_caching": True,
    "kv_reservation": "prompt",
    "capacity_scheduler_policy": "guaranteed_no_evict",
    "async_scheduling": True,
}

PRESETS: Final = {"sglang": SGLANG, "tensorrt-llm": TENSORRT_LLM}

NOT_OVERLAPPED: Final = ("speculative_config", "pipeline_parallel_size")
"""Settings with which steps are not scheduled ahead."""


def with_preset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The stated settings of an engine, and those with which its scheduler comes."""
    preset = dict(PRESETS.get(str(settings.get("scheduler")), {}))
    if not preset:
        return dict(settings)
    if any(name in settings for name in NOT_OVERLAPPED):
        del preset["async_scheduling"]
    merged = preset | dict(settings)
    return {"chunk_unit_size": merged["block_size"]} | merged
