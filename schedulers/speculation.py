"""Speculative decoding: a decode also computes draft tokens, and keeps those that the model itself would have chosen.

A step verifies the drafts of all decodes in one pass. A decode whose first a drafts are right emits a + 1 tokens: the
drafts, and the token that the model puts after them (Leviathan et al., arXiv:2211.17192). Their number is known when
the step has run, so a backend calls `record_outputs` before `end_step`, and a step cannot begin before the one before
it has ended.

A draft is an offer, never a duty: it takes no token of the step from another decode's next one, and no block that
another sequence needs. Prompts get the tokens that drafts leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Final, NamedTuple, TypeAlias

from schedulers.batches import Batch, Chunk, DecodeBatch, DraftedSteps
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.kv_cache import KVCache
from schedulers.lifecycle import RunningPass
from schedulers.sequence import DECODING, DecodeSet, Sequence
from schedulers.step_policies import ChunkPolicy, DraftPolicy

Propose: TypeAlias = Callable[[Sequence, int], int]
"""Proposes draft tokens for the next step of a decode, at most the given number, and returns how many it has."""


class AnswerDrafts(NamedTuple):
    """The outcomes of drafts at each position of one answer; at position n, n of its tokens are known.

    Attributes:
        drafted: tokens of the draft; 0 where there is none. right: of them, the first ones that the answer has.
    """

    drafted: list[int]
    right: list[int]


COUNTERS: Final = (
    "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "num_decodes",
    "num_emitted_tokens",
)  # fmt: skip
"""Counters of an engine's speculation, named as vLLM's metrics.

Decodes that verified draft tokens; those tokens; of them those that were right, also at each position of a draft; all
decodes, with a draft or without, and the tokens that they emitted.
"""


class SpeculationStats:
    """Its attributes are `COUNTERS`."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_decodes = self.num_emitted_tokens = 0
        self.num_accepted_tokens_per_pos = [0] * num_speculative_tokens

    def counters(self) -> dict[str, int | list[int]]:
        return {name: getattr(self, name) for name in COUNTERS}

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Count a decode that verified `num_drafted` draft tokens, the first `num_accepted` of which were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    def observe_steps(self, steps: DraftedSteps) -> None:
        """Count all decodes of some steps, as `observe` and `record_outputs` do one by one."""
        self.num_decodes += len(steps.decodes) * len(steps.rows)
        self.num_emitted_tokens += sum(decode.num_tokens for decode in steps.decodes)
        self.num_draft_tokens += steps.num_draft_tokens
        for right, drafts in enumerate(steps.num_accepted):
            self.num_drafts += drafts
            self.num_accepted_tokens += right * drafts
            for position in range(right):
                self.num_accepted_tokens_per_pos[position] += drafts


class SpeculativeDecodeSet(DecodeSet):
    """Decodes that get different numbers of tokens a step: each one's counts are kept in its own sequence.

    They are counted when a step has run. `in_step`: a step has begun and not ended.
    """

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.in_step = False

    def add(self, sequence: Sequence) -> None:
        sequence.state = DECODING
        sequence.joined_step = self.step_index
        self.sequences[sequence] = None
        self.size += 1
        self.kv_tokens += sequence.num_computed_tokens

    def remove(self, sequence: Sequence) -> None:
        """See `DecodeSet.remove`. A sequence that leaves in a running step keeps the one token that it computes."""
        self.kv_tokens -= sequence.num_computed_tokens
        if self.in_step and sequence.joined_step != self.step_index:
            sequence.num_computed_tokens += 1
            sequence.num_output_tokens += 1
        sequence.joined_step = -1
        sequence.left_step = self.step_index
        del self.sequences[sequence]
        self.size -= 1

    def num_computed_tokens(self, sequence: Sequence) -> int:
        return sequence.num_computed_tokens

    def num_output_tokens(self, sequence: Sequence) -> int:
        """Output tokens of a decoding sequence, of steps that have ended."""
        return sequence.num_output_tokens

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence the tokens that it has emitted."""
        sequence.num_computed_tokens += num_tokens
        sequence.num_output_tokens += num_tokens
        self.kv_tokens += num_tokens

    def longest(self) -> int:
        return max((sequence.num_computed_tokens for sequence in self.sequences), default=0)

    def check_integrity(self) -> None:
        tokens = sum(sequence.num_computed_tokens for sequence in self.sequences)
        if (len(self.sequences), tokens) != (self.size, self.kv_tokens):
            raise AssertionError(f"{self.size} decodes of {self.kv_tokens} tokens: {len(self.sequences)} of {tokens}")


class SpeculativeEngineCore(EngineCore):
    """An engine's scheduler with speculative decoding. `drafts` allows at most `num_speculative_tokens`.

    Attributes:
        propose: proposes draft tokens for a decode. It is called when a step begins, for each of its decodes in turn.
            The backend sets it; by default there are as many as may be.
        foreseen: coming steps, where a backend knows what they are going to emit and has said so.
    """

    def __init__(
        self,
        config: EngineConfig,
        drafts: DraftPolicy,
        num_speculative_tokens: int,
        chunk_policy: ChunkPolicy | None = None,
        make_cache: type[KVCache] = KVCache,
    ) -> None:
        super().__init__(config, chunk_policy, make_cache)
        self.speculative_decodes = SpeculativeDecodeSet(config.block_size)
        self.decode_set = self.speculative_decodes
        self.draft_policy = drafts
        self.propose: Propose = as_many_as_may_be
        self.stats = SpeculationStats(num_speculative_tokens)
        self.foreseen: DraftedSteps | None = None
        self._drafts: dict[Sequence, int] = {}  # of the step being scheduled
        self._drafts_are_fixed = not getattr(drafts, "learns", True)

    def record_outputs(self, batch: Batch, num_accepted: Many[int], num_tokens: Many[int]) -> None:
        """Record what a step has decoded, before `end_step`. Sequences that were aborted meanwhile are passed over.

        Args:
            num_accepted: draft tokens of each decode that are right, from the first on.
            num_tokens: tokens that each decode emits: one more than that, or fewer if its answer ends before.
        """
        self.speculative_decodes.in_step = False
        stats = self.stats
        for i, sequence in enumerate(batch.decodes):
            drafted = batch.draft_tokens[i]
            if drafted:
                stats.observe(drafted, num_accepted[i])
                self.draft_policy.observe(drafted, num_accepted[i])
            if sequence.state == DECODING:
                stats.num_decodes += 1
                stats.num_emitted_tokens += num_tokens[i]
                self.speculative_decodes.extend(sequence, num_tokens[i])

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        """See `EngineCore.end_step`. `record_outputs` came before."""
        if self.speculative_decodes.in_step:
            raise AssertionError("expected record_outputs before end_step")
        at_limit = [s for s in batch.decodes if s.state == DECODING and s.num_output_tokens >= s.max_tokens]
        return super().end_step(batch, [*at_limit, *stopped], now)

    def steady_decode_steps(self) -> int:
        """0: how many tokens a step emits is known only when it has run. See `steady_draft_tokens`."""
        return 0

    def steady_draft_tokens(self) -> int:
        """Draft tokens that each decode may verify in coming steps that only decode, as long as no request arrives.

        -1 if the next step does something else, or steps differ: drafts are adapted, or tokens are short for them. For
        a backend that knows what steps are going to emit (`foreseen`); they go on until a sequence finishes or blocks
        may run out: those of `blocks_of_drafted_step` for a step.
        """
        decode_set = self.speculative_decodes
        if not decode_set.size or self.prefilling or self.waiting_for_remote_kv or self.model_slots is not None:
            return -1
        if self.arrived:
            return -1
        if not self._drafts_are_fixed or (self.has_queued() and (self._sharing or not self.admission_blocked)):
            return -1
        drafts = self.draft_policy.num_draft_tokens(decode_set.size)
        return drafts if decode_set.size * (1 + drafts) <= self.config.max_num_batched_tokens else -1

    def blocks_of_drafted_step(self, draft_tokens: int) -> int:
        """The most blocks that a step takes in which every decode verifies this many draft tokens."""
        return self.speculative_decodes.size * (draft_tokens // self.config.block_size + 1)

    def num_new_blocks_by_step(self, steps: int) -> list[int]:
        """See `EngineCore.num_new_blocks_by_step`. The steps are foreseen."""
        assert self.foreseen is not None, "these steps are foreseen"
        return self.foreseen.new_blocks[:steps]

    def allocate_ahead(self, steps: int) -> None:
        """See `EngineCore.allocate_ahead`. The steps are foreseen."""
        new_blocks = sum(self.num_new_blocks_by_step(steps)) - self.blocks_allocated_ahead
        if new_blocks > 0:
            self.kv_cache.allocate_unassigned(new_blocks)
            self.blocks_allocated_ahead += new_blocks

    def run_foreseen(self) -> list[Sequence]:
        """Begin and end all steps that are foreseen. Returns the sequences that finish with the last, as `end_step`."""
        foreseen, decode_set = self.foreseen, self.speculative_decodes
        assert foreseen is not None, "these steps are foreseen"
        self.allocate_ahead(len(foreseen.rows))
        self.blocks_allocated_ahead -= sum(foreseen.new_blocks)
        self.foreseen = None
        self.stats.observe_steps(foreseen)
        for decode in foreseen.decodes:
            missing = self.num_missing_blocks(decode.sequence, decode.reach)
            if missing > 0:
                decode.sequence.blocks.num_private += missing
            decode_set.extend(decode.sequence, decode.num_tokens)
        decode_set.step_index += len(foreseen.rows)
        self.num_ended = decode_set.step_index
        if not foreseen.finishes:
            return []
        at_limit = [s for s in decode_set.sequences if s.num_output_tokens >= s.max_tokens]
        stopped = [decode.sequence for decode in foreseen.decodes if decode.stops]
        return self._finish_all((), [*at_limit, *stopped], decode_set.step_index)

    def _only_decodes(self) -> bool:
        return False  # decodes have blocks of their own, and drafts

    def _schedule_admitted(self, chunks: list[Chunk]) -> tuple[list[Sequence] | tuple[()], int]:
        """See `EngineCore._schedule_admitted`. Drafts get the tokens of the step before prompts behind them do."""
        self._drafts = self._propose_drafts()
        prompt_budget = self.prompt_budget(self.decode_set.size + sum(self._drafts.values()))
        running_pass = RunningPass(self, chunks, prompt_budget, self._drafts)
        paused = self.pause(running_pass.run())
        for sequence in running_pass.decodes:
            if sequence in self._drafts:
                running_pass.budget += self._allocate_drafts(sequence)
        return paused, min(running_pass.budget, running_pass.prompt_budget)

    def _begin_batch(
        self, chunks: list[Chunk], decodes: tuple[Sequence, ...], transferred: Many[Sequence], paused: Many[Sequence]
    ) -> Batch:
        """See `EngineCore._begin_batch`. No step may be running."""
        decode_set = self.speculative_decodes
        draft_tokens = [self._drafts.get(sequence, 0) for sequence in decodes]
        kv_tokens, longest = decode_set.kv_tokens + len(decodes) + sum(draft_tokens), 0
        drafted_kv = longest_undrafted = 0
        for sequence, drafted in zip(decodes, draft_tokens, strict=True):
            cached = sequence.num_computed_tokens + 1 + drafted
            longest = max(longest, cached)
            if drafted:
                drafted_kv += cached
            else:
                longest_undrafted = max(longest_undrafted, cached)
        decode_set.step_index += 1
        decode_set.in_step = True
        self._resume(paused)
        finishing: list[Sequence] = []
        kind = self._complete_prefills(chunks, decodes, finishing) if chunks else DecodeBatch
        step = decode_set.step_index
        batch = kind(chunks, decodes, kv_tokens, longest, transferred, finishing, step, draft_tokens)
        batch.drafted_kv = drafted_kv
        batch.longest_undrafted = longest_undrafted
        return batch

    def num_blocks_to_decode(self, sequence: Sequence) -> int:
        """Blocks that a sequence lacks for its next token; its drafts may have left it some."""
        return max(self.num_missing_blocks(sequence, sequence.num_computed_tokens + 1), 0)

    def allocate_to_decode(self, sequence: Sequence, new_blocks: int) -> int:
        """See `EngineCore.allocate_to_decode`. A decode counts its blocks at once."""
        self.kv_cache.allocate(sequence.blocks, new_blocks)
        return 0

    def num_in_flight_outputs(self, sequence: Sequence, num_scheduled: int = 0) -> int:
        return 0  # steps do not overlap

    def _propose_drafts(self) -> dict[Sequence, int]:
        """Draft tokens of decodes that have some, within the policy, the token budget and `max_tokens`."""
        decodes = self.decode_set.sequences
        max_tokens = self.draft_policy.num_draft_tokens(len(decodes))
        budget = self.config.max_num_batched_tokens - len(decodes)
        drafts: dict[Sequence, int] = {}
        for sequence in decodes:
            limit = min(max_tokens, budget, sequence.max_tokens - sequence.num_output_tokens - 1)
            drafted = self.propose(sequence, limit) if limit > 0 else 0
            if drafted:
                budget -= drafted
                drafts[sequence] = drafted
        return drafts

    def _allocate_drafts(self, sequence: Sequence) -> int:
        """Allocate the blocks of a draft, which is proposed anew if less of it fits. Returns the tokens taken back."""
        drafted, kv_cache = self._drafts[sequence], self.kv_cache
        blocks = kv_cache.num_blocks_of(sequence.blocks) + kv_cache.num_free_blocks
        fitting = min(drafted, blocks * kv_cache.block_size - sequence.num_computed_tokens - 1)
        if fitting < drafted:
            fitting = self._drafts[sequence] = self.propose(sequence, fitting) if fitting > 0 else 0
        missing = self.num_missing_blocks(sequence, sequence.num_computed_tokens + 1 + fitting)
        if missing > 0:
            self.kv_cache.allocate(sequence.blocks, missing)
        return drafted - fitting

    def _sync_blocks(self, sequence: Sequence) -> None:
        """See `EngineCore._sync_blocks`. A sequence has its blocks already."""
        self.admission_blocked = False

    def _num_unassigned_blocks(self) -> int:
        return self.blocks_allocated_ahead


def as_many_as_may_be(sequence: Sequence, max_tokens: int) -> int:
    """Propose `max_tokens` draft tokens."""
    return max_tokens
