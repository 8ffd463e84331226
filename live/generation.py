"""A request as the live engine carries it: its tokens, its sampling parameters and its output so far."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.sampling import SamplingParams
from workloads.request import Request

GREEDY = SamplingParams(temperature=0.0)

FinishReason: TypeAlias = Literal["", "stop", "length", "abort"]

TopLogprobs: TypeAlias = list[tuple[int, float]]
"""Token ids with their log-probabilities, the most likely first."""


@dataclass(frozen=True)
class Contract:
    """The part of a request that a scheduler knows besides its tokens; see `workloads.request.Request`."""

    arrival: float = 0.0
    priority: int = 0
    tenant: str = ""
    service_class: str = ""
    ttft_goal: float = inf


@dataclass(eq=False, slots=True)
class Generation:
    """One request with its output so far; times are seconds of the engine's clock, -1 until they are known.

    `min_tokens`: output tokens before which nothing ends the output. `stop_check`: called with each output token that
    is no end token; returns whether the output ends there. `logprobs`, `prompt_logprobs`: as in vLLM: -1 for none, 0
    for the token's own, n for the n most likely as well; the lists have one entry a token, of which the first prompt
    token has none. `times`: of each output token, if the engine keeps them. `pooled_output`: of a pooling request, the
    last token's hidden state after the final norm, (hidden,), or the logits of the labels, (labels,), float32.
    """

    request: Request
    prompt: npt.NDArray[np.int64]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    end_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    stop_check: Callable[[int], bool] | None = None
    logprobs: int = -1
    prompt_logprobs: int = -1
    output: list[int] = field(default_factory=list)
    finish_reason: FinishReason = ""
    submitted: float = -1.0
    scheduled: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    pooled_output: npt.NDArray[np.float32] | None = None
    times: list[float] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_token_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def ends_with(self, token: int) -> bool:
        """True if the output ends with `token`, which is the last of `output`."""
        enough = len(self.output) >= self.min_tokens
        if enough and token in self.end_tokens:
            return True
        return self.stop_check is not None and self.stop_check(token) and enough

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Token ids from `begin` to `end` of prompt and output together, which a chunk may compute again."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[begin:end]
        rest = np.array(self.output[max(begin - size, 0) : end - size], dtype=np.int64)
        return np.concatenate((self.prompt[begin:], rest)) if begin < size else rest


def prefix_ids(prompt: npt.NDArray[np.int64], block_size: int, cache_salt: bytes = b"") -> tuple[int, ...]:
    """One id for each full block: a hash of its tokens and all before it; prompts of other salts share no blocks."""
    ids: list[int] = []
    digest, content, size = cache_salt, prompt.tobytes(), block_size * prompt.itemsize
    for end in range(size, len(content) + 1, size):
        digest = blake2b(digest + content[end - size : end], digest_size=16).digest()
        ids.append(int.from_bytes(digest, "little"))
    return tuple(ids)


def make_generation(
    request_id: int,
    prompt: Many[int] | npt.NDArray[np.int64],
    max_tokens: int,
    *,
    sampling_params: SamplingParams | None = None,
    end_tokens: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    block_size: int = 16,
    task: str = "generate",
    stop_check: Callable[[int], bool] | None = None,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    cache_salt: bytes = b"",
    model: str = "default",
    contract: Contract = Contract(),
) -> Generation:
    """A generation with its request, which has the prefix ids that let the scheduler share cached blocks.

    A request for the prompt's log-probabilities shares none: they need every prompt token's hidden state.
    """
    tokens = np.asarray(prompt, dtype=np.int64)
    shared = prefix_ids(tokens, block_size, cache_salt) if prompt_logprobs < 0 else ()
    request = Request(
        request_id, contract.arrival, len(tokens), max_tokens, model, shared, task, contract.priority,
        tenant=contract.tenant, service_class=contract.service_class, ttft_goal=contract.ttft_goal,
    )  # fmt: skip
    params = sampling_params or SamplingParams()
    return Generation(request, tokens, params, end_tokens, min_tokens, stop_check, logprobs, prompt_logprobs)
