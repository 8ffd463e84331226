"""The rules in which schedulers differ: versions of vLLM by the name of the first that has them, and other engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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
"""All schedulers by name. `schedulers.presets` has the settings with which engines other than vLLM come."""
