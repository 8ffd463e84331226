"""Token ids for requests that have only lengths and shared prefixes."""

from __future__ import annotations

import numpy as np

from kernels.sampling import SamplingParams
from live.generation import Generation, make_generation
from workloads.request import Request

GREEDY = SamplingParams(temperature=0.0)


def materialise(request: Request, answer: int, vocabulary: int, id_tokens: int) -> Generation:
    """A generation with random tokens, whose prompt shares blocks with exactly the requests that share its prefix ids.

    Args:
        answer: number of output tokens; ignored for a task without output.
        id_tokens: prompt tokens that one prefix id stands for.
    """
    parts = [np.random.default_rng([7, key]).integers(vocabulary, size=id_tokens) for key in request.prefix_blocks]
    rest = request.prompt_tokens - id_tokens * len(parts)
    parts.append(np.random.default_rng([11, request.id]).integers(vocabulary, size=max(rest, 0)))
    prompt = np.concatenate(parts)[: request.prompt_tokens]
    return make_generation(
        request.id,
        prompt,
        answer if request.max_tokens else 0,
        sampling_params=GREEDY,
        block_size=id_tokens,
        task=request.task,
        arrival=request.arrival,
        priority=request.priority,
        model=request.model,
    )
