"""What one step runs: the typed batches that a scheduler hands to a plant.

The type is a resource contract, decided before anything is launched (Prelude 3, table 1). A `OneShotBatch` leaves
nothing behind but its answers; a `DecodeBatch` advances residents by a token each; a `MixedBatch` does both, or
prefills prompts whose cache stays.

A plant reads `chunks` and `decodes`; a latency model needs only the numbers. Neither writes.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedulers.sequence import Sequence


class Chunk:
    """Prompt tokens of one sequence in one step.

    `context` tokens of it are in the cache already, `tokens` more are computed now; `last` says that they complete the
    prompt, so that the step's output holds the sequence's next token.
    """

    __slots__ = ("context", "last", "sequence", "tokens")

    def __init__(self, sequence: Sequence, tokens: int, context: int, last: bool) -> None:
        self.sequence, self.tokens, self.context, self.last = sequence, tokens, context, last

    def __repr__(self) -> str:
        return f"Chunk({self.sequence.request.id}: {self.context}+{self.tokens}{' last' if self.last else ''})"


class Batch:
    """One step.

    Attributes:
        chunks: prompt chunks, in the order in which they were admitted. `prefill_tokens` is the sum of their tokens.
        decodes: sequences that get one token each, oldest first; `n_decodes` is how many.
        decode_kv: cached tokens that all decodes attend to, their new ones included. `longest_decode`: the most that
            one of them attends to.
        outputs: rows that go through the LM head and the sampler: the decodes and the prompts that are completed.
        arrived: decodes that have just come with their cache from a prefill engine.
        ending: sequences that reach their `max_tokens` with this step.
        tick: how many steps the scheduler had begun, this one included.
    """

    __slots__ = (
        "arrived", "chunks", "decode_kv", "decodes", "ending", "longest_decode", "n_decodes", "outputs",
        "prefill_tokens", "tick",
    )  # fmt: skip

    def __init__(
        self,
        chunks: Many[Chunk],
        decodes: Many[Sequence] = (),
        decode_kv: int = 0,
        longest_decode: int = 0,
        arrived: Many[Sequence] = (),
        ending: Many[Sequence] = (),
        tick: int = 0,
    ) -> None:
        self.chunks, self.decodes = chunks, decodes
        self.n_decodes = self.outputs = len(decodes)
        self.decode_kv, self.longest_decode = decode_kv, longest_decode
        self.prefill_tokens = 0
        for chunk in chunks:
            self.prefill_tokens += chunk.tokens
            self.outputs += chunk.last
        self.arrived, self.ending, self.tick = arrived, ending, tick

    @property
    def tokens(self) -> int:
        """Rows of the linear layers: prompt tokens and one for each decode."""
        return self.prefill_tokens + self.n_decodes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.chunks)}, {self.n_decodes} decodes of {self.decode_kv} tokens)"


class OneShotBatch(Batch):
    """Prompts that are answered by this one forward pass. No decode slot, no cache that outlives the step."""

    __slots__ = ()


class DecodeBatch(Batch):
    """One token for every resident sequence."""

    __slots__ = ()


class MixedBatch(Batch):
    """Prompt chunks whose cache stays, beside decodes or alone; or one-shot work beside decodes."""

    __slots__ = ()
