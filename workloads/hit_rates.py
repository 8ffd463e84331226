"""Prompts of which a warm prefix cache supplies a stated share, by real common beginnings."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from workloads.block_reuse import BlockStream
from workloads.checks import IntArray
from workloads.errors import BadInput
from workloads.prefixes import SharedPrefixes
from workloads.trace import IdLists, Trace

BLOCK_TOKENS = 16
"""Tokens of a block, as of an engine's default."""

HALVINGS = 12
"""Steps of the search for the share of a trace's prompts that keep their prefixes."""


def common_beginning(prompts: IntArray, share: float) -> SharedPrefixes | None:
    """One beginning of all prompts, of which a warm cache supplies the share of all tokens; None for 0.

    The last token of a prompt is always computed: `BadInput` for more than the mean prompt leaves.
    """
    beginnings = np.arange(0, int(prompts.mean()) + 1, BLOCK_TOKENS)
    supplied = [np.minimum(tokens, prompts - 1) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in beginnings]
    shares = np.array([tokens.sum() for tokens in supplied]) / prompts.sum()
    if share > shares[-1]:
        expected = f"expected at most {shares[-1]:.2f}: prompts share a beginning no longer than the mean prompt"
        raise BadInput(expected, field="workload.hit_rate", value=share)
    tokens = int(beginnings[int(np.argmin(np.abs(shares - share)))])
    return SharedPrefixes(1, tokens, BLOCK_TOKENS) if tokens else None


@lru_cache(4)  # every candidate of a plan has the same
def thinned(trace: Trace, share: float) -> Trace:
    """The trace in which random prompts share nothing with others, so that hits have this share; else `BadInput`."""
    assert trace.prefix_blocks is not None
    assert trace.prefix_block_tokens is not None
    ranks = np.random.default_rng(0).permutation(len(trace)) / len(trace)
    blocks = [list(ids) for ids in trace.prompt_blocks(slice(None))]
    lookups = [max(prompt - 1, 0) // trace.prefix_block_tokens for prompt in trace.prefill_tokens.tolist()]
    per_block = trace.prefix_block_tokens / int(trace.prefill_tokens.sum())

    def hits(kept: float) -> float:
        stream = BlockStream()
        for ids, looked_up, rank in zip(blocks, lookups, ranks.tolist(), strict=True):
            if rank < kept:
                stream.add(ids, min(looked_up, len(ids)))
        return stream.infinite_hits() * per_block

    highest = hits(1.0)
    if share > highest + 1e-9:
        expected = f"expected at most {highest:.3f}, which is what the trace {trace.name} has"
        raise BadInput(expected, field="workload.hit_rate", value=share)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if hits(middle) < share else (low, middle)
    fresh = iter(range(2**63, 2**64))
    ids = [ids if rank < high else [next(fresh) for _ in ids] for ids, rank in zip(blocks, ranks.tolist(), strict=True)]
    return replace(trace, prefix_blocks=IdLists.of(ids))
