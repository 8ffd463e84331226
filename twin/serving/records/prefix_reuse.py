"""Prefix caches in a run: how much of the prompts they supplied, and how much any cache could have."""

from __future__ import annotations

from typing import Any, NamedTuple

from twin.serving.records.requests import RequestRecord
from workloads.block_reuse import BlockStream


class Prompt(NamedTuple):
    """A finished request: when its first step began and its last ended, seconds; its prefix ids; tokens."""

    begin: float
    end: float
    ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


class PrefixReuse:
    """The prompts of a run, from which bounds of its prefix caches are computed.

    Attributes:
        node_tokens: prompt tokens of one prefix id.
        capacities: ids that the caches hold on `device`, and in `all` tiers together.
        cached_tokens: prompt tokens that caches supplied to requests when they began.
    """

    def __init__(self, node_tokens: int, capacities: dict[str, int]) -> None:
        self.node_tokens = node_tokens
        self.capacities = capacities
        self.cached_tokens = 0
        self._prompts: list[Prompt] = []

    def add(self, record: RequestRecord) -> None:
        request = record.request
        self.cached_tokens += record.cached_tokens
        self._prompts.append(
            Prompt(
                record.scheduled, record.last_token, request.prefix_blocks, request.prompt_tokens, record.output_tokens
            )
        )

    def stream(self) -> BlockStream:
        """The blocks in the order of time: looked up when a request begins, left behind when it ends."""
        turns: list[tuple[float, int, int, Prompt]] = []
        for number, prompt in enumerate(self._prompts):
            turns.append((prompt.begin, 1, number, prompt))
            turns.append((prompt.end, 0, number, prompt))
        stream, size = BlockStream(), self.node_tokens
        for _, begins, _, prompt in sorted(turns):
            if begins:
                blocks, lookups = prompt.prompt_tokens // size, (prompt.prompt_tokens - 1) // size
            else:  # the last token of an answer has no KV cache
                blocks, lookups = (prompt.prompt_tokens + max(prompt.output_tokens - 1, 0)) // size, 0
            ids = prompt.ids[:blocks]
            stream.add(ids, min(lookups, len(ids)))
        return stream

    def summary(self) -> dict[str, Any]:
        """Shares of all prompt tokens: those that caches supplied, and bounds for one cache of the same size.

        `lru` evicts the least recently used block, `belady` knows what is needed next, `infinite` evicts nothing.
        """
        stream, prompts = self.stream(), sum(prompt.prompt_tokens for prompt in self._prompts)
        if not prompts:
            return {"hit_rate": None}

        def share(blocks: int) -> float:
            return blocks * self.node_tokens / prompts

        bounds = {
            name: {"lru": share(int(stream.lru_hits([size])[0])), "belady": share(stream.belady_hits(size))}
            for name, size in self.capacities.items()
        }
        return {"hit_rate": self.cached_tokens / prompts, **bounds, "infinite": share(stream.infinite_hits())}
