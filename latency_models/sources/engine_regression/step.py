"""Features of a step, which predict its duration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedulers.batches import Batch


@dataclass(frozen=True, slots=True)
class Step:
    """Features of one step, and its duration.

    Attributes:
        rows: prompt tokens, decodes and their draft tokens.
        decode_attention: decodes × tokens of the longest, in whole blocks; of decodes that verify no drafts.
        chunk_attention: Σ tokens · (context + tokens) over prompt chunks.
        decodes, chunks: numbers of them.
        outputs: rows of the LM head.
        seconds: the measured duration; 0 where it is to be predicted.
        transfers: decodes that were admitted with a cache from a prefill engine. received: prompt tokens of them.
        drafted: decodes that verify drafts. drafted_kv: tokens that these attend to.
    """

    rows: int
    decode_attention: int
    chunk_attention: int
    decodes: int
    chunks: int
    outputs: int
    seconds: float = 0.0
    transfers: int = 0
    received: int = 0
    drafted: int = 0
    drafted_kv: int = 0


def describe(batch: Batch, block_size: int, seconds: float = 0.0) -> Step:
    """Features of a batch."""
    seen = received = 0
    for sequence in batch.transferred:
        received += sequence.request.prompt_tokens
    for chunk in batch.chunks:
        seen += chunk.tokens * (chunk.context + chunk.tokens)
    step = Step(
        rows=batch.tokens,
        decode_attention=batch.n_decodes * whole_blocks(batch.longest_decode, block_size),
        chunk_attention=seen,
        decodes=batch.n_decodes,
        chunks=len(batch.chunks),
        outputs=batch.outputs,
        seconds=seconds,
        transfers=len(batch.transferred),
        received=received,
    )
    return step if not batch.draft_tokens else _with_drafts(step, batch, block_size)


def _with_drafts(step: Step, batch: Batch, block_size: int) -> Step:
    """The features of a step that may verify drafts: those decodes are computed like prompt chunks."""
    drafted = sum(tokens > 0 for tokens in batch.draft_tokens)
    seen = (step.decodes - drafted) * whole_blocks(batch.longest_undrafted, block_size)
    return replace(step, decode_attention=seen, drafted=drafted, drafted_kv=batch.drafted_kv)


def whole_blocks(tokens: int, block_size: int) -> int:
    """Tokens rounded up to whole blocks."""
    return -(-tokens // block_size) * block_size
