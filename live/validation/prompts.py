"""Token ids for requests that have only lengths and shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.sampling import SamplingParams
from live.generation import Contract, Generation, make_generation
from workloads.request import Request

GREEDY = SamplingParams(temperature=0.0)


def materialise(request: Request, answer: int, vocabulary: int, id_tokens: int) -> Generation:
    """A generation with random tokens, whose prompt shares blocks with exactly the requests that share its prefix ids.

    Args:
        answer: number of output tokens; ignored for a task without output.
        id_tokens: prompt tokens that one prefix id stands for.
    """
    prompt = prefix_tokens(request.prefix_blocks, (request.id,), request.prompt_tokens, vocabulary, id_tokens)
    return make_generation(
        request.id,
        prompt,
        answer if request.max_tokens else 0,
        sampling_params=GREEDY,
        block_size=id_tokens,
        task=request.task,
        model=request.model,
        contract=Contract(request.arrival, request.priority, request.tenant, request.service_class, request.ttft_goal),
    )


def prefix_tokens(
    ids: Sequence[int], key: Sequence[int], tokens: int, vocabulary: int, id_tokens: int
) -> npt.NDArray[np.int64]:
    """A prompt of so many random tokens: those of a block depend on its id, and the rest on `key`."""
    parts = [np.random.default_rng([7, each]).integers(vocabulary, size=id_tokens) for each in ids]
    rest = max(tokens - id_tokens * len(parts), 0)
    parts.append(np.random.default_rng([11, *key]).integers(vocabulary, size=rest))
    prompt: npt.NDArray[np.int64] = np.concatenate(parts)[:tokens]
    return prompt
