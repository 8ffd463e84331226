"""The work of one step: typed batches that a scheduler hands to a backend.

The type says what the step may leave behind (Prelude 3, table 1). A `OneShotBatch` leaves nothing but its results, a
`DecodeBatch` advances running sequences by a token each, and a `MixedBatch` does both or prefills prompts whose cache
stays. A backend reads `chunks` and `decodes`; a latency model needs only the numbers. Neither changes a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

from schedulers.model_slots import ModelLoad
from schedulers.sequence import Sequence


class Chunk:
    """Prompt tokens of one sequence in one step.

    Attributes:
        tokens: prompt tokens computed by this step. context: tokens that are in the cache before it.
        last: the chunk completes the prompt, so that the step also produces the sequence's next token.
    """

    __slots__ = ("context", "last", "sequence", "tokens")

    def __init__(self, sequence: Sequence, tokens: int, context: int, last: bool) -> None:
        self.sequence = sequence
        self.tokens = tokens
        self.context = context
        self.last = last

    def __repr__(self) -> str:
        return f"Chunk({self.sequence.request.id}: {self.context}+{self.tokens}{' last' if self.last else ''})"


class Batch:
    """One step.

    Attributes:
        chunks: prompt chunks in the order of admission. `prefill_tokens` is the sum of their tokens.
        decodes: decoding sequences, oldest admission first; `n_decodes` is their number.
        draft_tokens: draft tokens that each decode computes beside its input token (`schedulers.speculation`); empty
            without speculation. decode_tokens: rows of the linear layers that are decodes' tokens, drafts included.
        drafted_kv: of `decode_kv`, the share of decodes with draft tokens. longest_undrafted: the largest share of one
            decode without. Both are 0 without speculation.
        decode_kv: cached tokens that all decodes attend to, their new tokens included. longest_decode: the largest
            share of one decode.
        outputs: rows that go through the LM head and the sampler: those of decodes and one of each completed prompt.
        transferred: decodes that were admitted in this step with a cache computed by a prefill engine.
        loads: models that are loaded before the step computes (`schedulers.model_slots`).
        paused: decodes that get no token in this step, since the tokens or blocks did not suffice.
        finishing: sequences that reach their `max_tokens` in this step.
        step_index: number of this step, counted from 1.
    """

    __slots__ = (
        "chunks", "decode_kv", "decode_tokens", "decodes", "draft_tokens", "drafted_kv", "finishing", "loads",
        "longest_decode", "longest_undrafted", "n_decodes", "outputs", "paused", "prefill_tokens", "step_index",
        "transferred",
    )  # fmt: skip

    def __init__(
        self,
        chunks: Many[Chunk],
        decodes: Many[Sequence] = (),
        decode_kv: int = 0,
        longest_decode: int = 0,
        transferred: Many[Sequence] = (),
        finishing: Many[Sequence] = (),
        step_index: int = 0,
        draft_tokens: Many[int] = (),
    ) -> None:
        self.chunks = chunks
        self.decodes = decodes
        self.draft_tokens = draft_tokens
        self.n_decodes = self.decode_tokens = len(decodes)
        if draft_tokens:
            self.decode_tokens += sum(draft_tokens)
        self.outputs = self.decode_tokens
        self.decode_kv = decode_kv
        self.longest_decode = longest_decode
        self.prefill_tokens = 0
        for chunk in chunks:
            self.prefill_tokens += chunk.tokens
            self.outputs += chunk.last
        self.transferred = transferred
        self.finishing = finishing
        self.step_index = step_index
        self.loads: Many[ModelLoad] = ()
        self.paused: Many[Sequence] = ()
        self.drafted_kv = self.longest_undrafted = 0

    @property
    def tokens(self) -> int:
        """Rows of the linear layers: tokens of prompts and of decodes."""
        return self.prefill_tokens + self.decode_tokens

    def has_output(self, sequence: Sequence) -> bool:
        """Tell whether the step computes an output token of a sequence, as a decode or by its last prompt chunk."""
        return sequence in self.decodes or any(chunk.last and chunk.sequence is sequence for chunk in self.chunks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.chunks)}, {self.n_decodes} decodes of {self.decode_kv} tokens)"


class OneShotBatch(Batch):
    """Prompts that are complete after this forward pass. They use no decode slot and keep no cache."""

    __slots__ = ()


class DecodeBatch(Batch):
    """One token for every running sequence, and the draft tokens that it verifies."""

    __slots__ = ()


class MixedBatch(Batch):
    """Prompt chunks whose cache stays, with or without decodes; or one-shot work beside decodes."""

    __slots__ = ()


class DraftedDecode:
    """One decode in `DraftedSteps`.

    Attributes:
        num_drafted: the draft tokens that it verifies in each step.
        num_tokens: tokens that it emits in all steps together. reach: cached tokens that its blocks must hold.
        stops: its answer ends with the last step.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.num_drafted: list[int] = []
        self.num_tokens = self.reach = 0
        self.stops = False


class DraftedSteps:
    """Coming steps that verify drafts of the same decodes, with what they are going to emit.

    Attributes:
        decodes: what each decode does, oldest admission first.
        draft_tokens: the most that a decode verifies in a step. num_draft_tokens: those of all steps together.
        num_accepted: how many drafts have 0, 1, … tokens that are right.
        rows, kv_tokens, longest: of each step, as `Batch.decode_tokens`, `decode_kv` and `longest_decode`.
        new_blocks: KV blocks that each step takes.
        finishes: whether a sequence finishes with the last step.
    """

    def __init__(self, decodes: list[DraftedDecode], draft_tokens: int) -> None:
        self.decodes = decodes
        self.draft_tokens = draft_tokens
        self.num_draft_tokens = 0
        self.num_accepted = [0] * (draft_tokens + 1)
        self.rows: list[int] = []
        self.kv_tokens: list[int] = []
        self.longest: list[int] = []
        self.new_blocks: list[int] = []
        self.finishes = False

    def batches(self) -> Iterator[Batch]:
        sequences = tuple(decode.sequence for decode in self.decodes)
        for step, (kv, longest) in enumerate(zip(self.kv_tokens, self.longest, strict=True)):
            draft_tokens = [decode.num_drafted[step] for decode in self.decodes]
            yield DecodeBatch((), sequences, kv, longest, draft_tokens=draft_tokens)
