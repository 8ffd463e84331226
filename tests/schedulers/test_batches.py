"""A batch counts the tokens of its prompts and of its decodes."""

from __future__ import annotations

from schedulers.batches import Chunk, DecodeBatch, MixedBatch
from schedulers.sequence import Sequence
from workloads.request import Request


def sequences(count: int) -> list[Sequence]:
    return [Sequence(Request(number, 0.0, 10, 5), number, False) for number in range(count)]


def test_a_decode_computes_and_emits_one_token() -> None:
    batch = DecodeBatch((), sequences(3), 30, 10)
    assert (batch.tokens, batch.outputs) == (3, 3)
    assert batch.decode_tokens == 3


def test_with_three_draft_tokens_a_decode_computes_four() -> None:
    first, second, third = sequences(3)
    chunks = [Chunk(first, 7, 0, False), Chunk(second, 10, 0, True)]
    batch = MixedBatch(chunks, [third], 30, 10, draft_tokens=[3])
    assert (batch.prefill_tokens, batch.n_decodes) == (17, 1)
    assert (batch.tokens, batch.outputs) == (21, 5)
