"""The rules in which versions of vLLM's scheduler differ, by the name of the first version that has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class VersionRules:
    """Rules in which versions of vLLM's scheduler differ.

    Attributes:
        reuse_unhashed_first: freed blocks that no prompt can find are allocated before all others.
        goes_on_behind_preempted: when the sequence whose turn it is preempts itself for its low priority, those behind
            it are scheduled all the same.
        lone_prompt_ignores_threshold: `long_prefill_token_threshold` does not hold for the only request.
        steps_back_for_idle: when a sequence is preempted before the one whose turn it is, that one keeps its turn even
            if the preempted one was not scheduled in this step; otherwise its turn passes.
    """

    reuse_unhashed_first: bool = True
    goes_on_behind_preempted: bool = True
    lone_prompt_ignores_threshold: bool = True
    steps_back_for_idle: bool = True


SCHEDULER_VERSIONS: Final = {
    "vllm-0.19": VersionRules(False, False, False, False),
    "vllm-0.32": VersionRules(goes_on_behind_preempted=False),
    "vllm-0.33": VersionRules(),
}
"""Versions whose decisions `EngineCore` repeats step by step (`tests/vllm_parity/`)."""

NULL_BLOCKS: Final = 1
"""Blocks in vLLM's own `num_gpu_blocks` that no request gets: its placeholder."""

INSTALLED_VLLM: Final = "installed-vllm"
"""In place of a version: the simulator runs the scheduler of the vLLM in its environment (`schedulers.hosted_core`)."""

DEFAULT_SCHEDULER: Final = "vllm-0.33"
