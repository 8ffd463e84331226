"""The rules in which schedulers differ, by the name of the first vLLM that has them; settings that others come with.

SGLang 0.5.9 `server_args.py`: prompts before decodes, chunks of 8,192 tokens (80 GB of memory), at most 16,384 prompt
tokens a step, pages of one token, and the overlap scheduler. TensorRT-LLM 1.3 `llmapi/llm_args.py`: blocks of 32
tokens, 8,192 tokens a step, whole prompts, no eviction of what runs, and the overlap scheduler. A scenario may state
other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """Rules in which schedulers differ that are no settings of theirs.

    Attributes:
        reuse_unhashed_first: freed blocks that no prompt can find are allocated before all others.
        goes_on_behind_preempted: when the sequence whose turn it is preempts itself for its low priority, those behind
            it are scheduled all the same.
        lone_prompt_ignores_threshold: `long_prefill_token_threshold` does not hold for the only request.
        steps_back_for_idle: when a sequence is preempted before the one whose turn it is, that one keeps its turn even
            if the preempted one was not scheduled in this step; otherwise its turn passes.
        keeps_preempted_blocks: what a preempted sequence has computed beside its shared prompt can be found again.
        requeues_behind: a preempted sequence waits behind those that came meanwhile.
        merges_equal_blocks: of equal blocks that two sequences have computed, one is freed at once.
        full_until_smaller: a batch without room is full until it is smaller (`schedulers.capacity.FullBatch`).
    """

    reuse_unhashed_first: bool = True
    goes_on_behind_preempted: bool = True
    lone_prompt_ignores_threshold: bool = True
    steps_back_for_idle: bool = True
    keeps_preempted_blocks: bool = True
    requeues_behind: bool = False
    merges_equal_blocks: bool = False
    full_until_smaller: bool = False


SCHEDULER_VERSIONS: Final = {
    "vllm-0.19": SchedulerRules(False, False, False, False),
    "vllm-0.32": SchedulerRules(goes_on_behind_preempted=False),
    "vllm-0.33": SchedulerRules(),
}
"""Versions whose decisions `EngineCore` repeats step by step (`tests/vllm_parity/`)."""

NULL_BLOCKS: Final = 1
"""Blocks in vLLM's own `num_gpu_blocks` that no request gets: its placeholder."""

INSTALLED_VLLM: Final = "installed-vllm"
"""In place of a version: the simulator runs the scheduler of the vLLM in its environment (`schedulers.hosted_core`)."""

DEFAULT_SCHEDULER: Final = "vllm-0.33"

SCHEDULERS: Final = SCHEDULER_VERSIONS | {
    "sglang": SchedulerRules(
        keeps_preempted_blocks=False, requeues_behind=True, merges_equal_blocks=True, full_until_smaller=True
    ),
    "tensorrt-llm": SchedulerRules(),
}
"""All schedulers by name. `schedulers.vllm_versions` has the settings with which engines other than vLLM come."""


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
