"""A request as the live plant carries it: its tokens, what it asks for, and what it has been given."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.sampling import Wish
from workloads.request import Request

Ending: TypeAlias = Literal["", "stop", "length", "abort"]

Likely: TypeAlias = list[tuple[int, float]]
"""Token ids and their log-probabilities, likeliest first."""


@dataclass(eq=False, slots=True)
class Generation:
    """One request and its answer so far.

    Attributes:
        request: what the scheduler sees. prompt: token ids, int64.
        wish: how tokens are drawn. end_tokens: ids that end the answer. fewest: tokens before which nothing ends it.
        until: told every token but those that end the answer already; whether it ends there (a stop string, say).
        top: log-probabilities wanted: -1 none, 0 of the tokens given, n also of the n likeliest.
        prompt_top: the same of the prompt's tokens.
        output: ids given so far. ending: why it is over, "" while it is not.
        logprobs, tops: one entry for each of `output`, where `top` asks for them.
        prompt_logprobs, prompt_tops: one entry for each prompt token where `prompt_top` asks for them; of the first
            there is none.
        submitted, scheduled, first_token, last_token: seconds of the engine's clock, -1 while they have not come.
        times: when each of `output` came, if the engine keeps that.
        pooled: where the request asks for no tokens but for what its last one comes to: the normed state, (hidden,)
            float32, or of a model that tells classes, for tasks that ask for these, (labels,) float32.
    """

    request: Request
    prompt: npt.NDArray[np.int64]
    wish: Wish = field(default_factory=Wish)
    end_tokens: frozenset[int] = frozenset()
    fewest: int = 0
    until: Callable[[int], bool] | None = None
    top: int = -1
    prompt_top: int = -1
    output: list[int] = field(default_factory=list)
    ending: Ending = ""
    submitted: float = -1.0
    scheduled: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    pooled: npt.NDArray[np.float32] | None = None
    times: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Likely] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_tops: list[Likely] = field(default_factory=list)

    def ends_with(self, token: int) -> bool:
        """Whether the answer is over with this token, which is the latest of `output`."""
        enough = len(self.output) >= self.fewest
        if enough and token in self.end_tokens:
            return True
        return self.until is not None and self.until(token) and enough

    def tokens(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Ids at positions of prompt and answer together: what a chunk computes, also again after a preemption."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[begin:end]
        rest = np.array(self.output[max(begin - size, 0) : end - size], dtype=np.int64)
        return np.concatenate((self.prompt[begin:], rest)) if begin < size else rest


def prefix_ids(prompt: npt.NDArray[np.int64], block_tokens: int, salt: bytes = b"") -> tuple[int, ...]:
    """One id for each whole block of a prompt, which says what is in it and in all before it.

    Args:
        salt: prompts with different ones share nothing.
    """
    ids: list[int] = []
    digest, content, size = salt, prompt.tobytes(), block_tokens * prompt.itemsize
    for end in range(size, len(content) + 1, size):
        digest = blake2b(digest + content[end - size : end], digest_size=16).digest()
        ids.append(int.from_bytes(digest, "little"))
    return tuple(ids)


def ask(
    number: int,
    prompt: Many[int] | npt.NDArray[np.int64],
    most: int,
    *,
    wish: Wish | None = None,
    end_tokens: frozenset[int] = frozenset(),
    fewest: int = 0,
    block_tokens: int = 16,
    task: str = "generate",
    arrival: float = 0.0,
    priority: int = 0,
    until: Callable[[int], bool] | None = None,
    top: int = -1,
    prompt_top: int = -1,
    salt: bytes = b"",
) -> Generation:
    """A generation with its request: prefix ids included, so that the scheduler can share its blocks.

    Whoever wants log-probabilities of the prompt shares none: of what is in the cache no state is left to tell them.
    """
    tokens = np.asarray(prompt, dtype=np.int64)
    shared = prefix_ids(tokens, block_tokens, salt) if prompt_top < 0 else ()
    request = Request(number, arrival, len(tokens), most, prefix_blocks=shared, task=task, priority=priority)
    return Generation(request, tokens, wish or Wish(), end_tokens, fewest, until, top, prompt_top)
