"""Token ids for requests of which only lengths and shared prefixes are known."""

from __future__ import annotations

import numpy as np

from kernels.sampling import Wish
from live.generation import Generation, ask
from workloads.request import Request

GREEDY = Wish(temperature=0.0)


def materialise(request: Request, answer: int, vocabulary: int, block_tokens: int, id_tokens: int) -> Generation:
    """A generation whose prompt shares its first blocks with those of requests with the same prefix ids, and no more.

    It ends after `answer` tokens, whatever they are. A task without output stays one.

    Args:
        id_tokens: prompt tokens that one prefix id stands for.
    """
    parts = [np.random.default_rng([7, key]).integers(vocabulary, size=id_tokens) for key in request.prefix_blocks]
    rest = request.prompt_tokens - id_tokens * len(parts)
    parts.append(np.random.default_rng([11, request.id]).integers(vocabulary, size=max(rest, 0)))
    prompt = np.concatenate(parts)[: request.prompt_tokens]
    return ask(
        request.id, prompt, answer if request.max_tokens else 0,
        wish=GREEDY, block_tokens=block_tokens, task=request.task, arrival=request.arrival, priority=request.priority,
    )  # fmt: skip
