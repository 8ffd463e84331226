"""How the prompts of a step share its tokens, where all that fit are admitted first.

The context chunking policies of TensorRT-LLM 1.3 (`cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp`,
`setCtxRequestsChunkSize`). A part of a prompt is a multiple of the unit, there the tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

FIRST_COME_FIRST_SERVED: Final = "first_come_first_served"
EQUAL_PROGRESS: Final = "equal_progress"
CHUNKING_POLICIES: Final = (FIRST_COME_FIRST_SERVED, EQUAL_PROGRESS)


def share_tokens(policy: str, remaining: Many[int], budget: int, unit: int) -> list[int]:
    """The tokens of each prompt in a step.

    Under `first_come_first_served` each in turn gets as much as is left. Under `equal_progress` each gets a unit in
    turn, or the rest of its prompt, until no further one fits. If all fit, all are whole.

    Args:
        remaining: tokens that each prompt still needs, in the order of admission.
        budget: tokens of the step that prompts may have.
    """
    if sum(remaining) <= budget:
        return list(remaining)
    shares = [0] * len(remaining)
    if policy == EQUAL_PROGRESS:
        grows = True
        while grows and budget > 0:
            grows = False
            for i, tokens in enumerate(remaining):
                part = min(unit, tokens - shares[i])
                if 0 < part <= budget:
                    shares[i] += part
                    budget -= part
                    grows = True
        return shares
    for i, tokens in enumerate(remaining):
        shares[i] = tokens if tokens <= budget else max(budget, 0) // unit * unit
        budget -= shares[i]
    return shares
