"""The scheduler of one engine, as a pure state machine.

A plant drives it through three calls, `submit`, `begin_step` and `end_step`, whenever it likes; `abort` takes a
request back. It holds no clock and never sees how long an answer will be: the plant says whose answer has ended. Steps
may overlap: a plant that schedules ahead begins step i + 1 before it ends step i (vLLM's async scheduling), and what is
decided then rests on what was known then.

The order of business of one step is vLLM V1's: whoever decodes gets a token, the youngest losing their cache where
blocks run out; then prompts that are under way go on; then, if nobody was preempted, waiting requests are admitted
while tokens, sequences and blocks last. Requests under the one-shot contract (Prelude 3) wait in a lane of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from schedulers.admission import admit, cold_key
from schedulers.batches import Batch, Chunk, DecodeBatch, MixedBatch, OneShotBatch
from schedulers.chunking import ChunkPolicy
from schedulers.cohort import Cohort
from schedulers.engine_config import EngineConfig
from schedulers.kv_cache import KVCache
from schedulers.sequence import DECODING, ENDING, FINISHED, PREFILLING, WAITING, Sequence
from schedulers.waiting import ORDERS, WaitingQueue, priority

if TYPE_CHECKING:
    from workloads.request import Request


class EngineCore:
    """One engine's scheduler.

    Attributes:
        config, chunks: the settings and the chunk policy. kv: the blocks. cohort: who decodes.
        lanes: who waits: [everybody], or with one-shot budgets [generation, one-shot work].
        arriving: who waits with its cache made elsewhere.
        running: who holds a seat, oldest admission first. visiting: admitted one-shot work, which holds none.
        held: finished sequences that keep their blocks until `release`.
        leading: first uncached prefix ids of prompts that are being computed.
        sequences: everybody who has been submitted and has not finished, by request id.
        load: prompt tokens and output limits of all who are here: what a router balances, and what it can know without
            asking how far anybody has come.
        preemptions, prefill_tokens, cached_tokens: counters: caches lost, prompt tokens scheduled to be computed, and
            prompt tokens that the prefix cache spared.
    """

    def __init__(
        self, config: EngineConfig, chunks: ChunkPolicy | None = None, make_cache: type[KVCache] = KVCache
    ) -> None:
        self.config, self.chunks = config, chunks
        node_blocks = config.prefix_id_tokens // config.block_tokens
        self.kv = make_cache(config.kv_blocks, config.block_tokens, node_blocks, config.prefix_caching)
        self.cohort = Cohort(config.block_tokens)
        self.lanes = [WaitingQueue(ORDERS[config.order]) for _ in range(2 if config.one_shot else 1)]
        self.arriving: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}
        self.visiting: dict[Sequence, None] = {}
        self.held: dict[Sequence, None] = {}
        self.leading: dict[int, None] = {}
        self.sequences: dict[int, Sequence] = {}
        self.load = 0
        self.preemptions = self.prefill_tokens = self.cached_tokens = 0
        self._prefilling: dict[Sequence, None] = {}
        self._submitted = 0
        self._share_late = config.share == "computed" and (config.prefix_caching or config.lead_cold_prefixes)
        self._stalled = False  # everybody who waits would find no seat or no blocks, until something changes

    # -- the plant's calls -------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, *, limit: int | None = None, computed: bool = False, hold: bool = False
    ) -> Sequence:
        """Take a request in. Nothing is decided until the next step, and `now` is not looked at.

        Args:
            limit: output tokens after which to end it, in place of its `max_tokens` (1 on a prefill engine).
            computed: its prompt's cache and its first token come with it, from a prefill engine.
            hold: keep its blocks when it has finished, until `release`.

        Raises:
            ValueError: an id that is here already, or a request that would not fit if it were alone.
        """
        if request.id in self.sequences:
            raise ValueError(f"request {request.id}: expected an id that is not being served, found one that is")
        one_shot = self.config.one_shot is not None and request.one_shot
        sequence = Sequence(request, self._submitted, one_shot)
        if limit is not None:
            sequence.limit = limit
        self._check_fits(sequence)
        self._submitted += 1
        self.load += request.prompt_tokens + sequence.limit
        sequence.hold = hold
        if computed:
            sequence.generated = 1
            self.arriving.append(sequence)
        else:
            self.lanes[-1 if one_shot else 0].push(sequence)
        self.sequences[request.id] = sequence
        self._stalled = False
        return sequence

    def begin_step(self, now: float) -> Batch | None:
        """Decide the next step. None when there is nothing to run."""
        cohort = self.cohort
        arrived = self._welcome() if self.arriving else ()
        starting = cohort.starting()
        preempted = bool(starting) and self._make_room(starting)
        decodes = tuple(cohort.members)
        chunks: list[Chunk] = []
        if self._prefilling or (not self._stalled and self._anybody_waits()):
            self._fill(chunks, len(decodes), preempted)
        if not decodes and not chunks:
            return None
        cohort.advance(1)
        kv, longest = cohort.kv, cohort.longest()
        ending = cohort.reach_limits()
        if ending:
            for sequence in ending:
                self._settle(sequence)
        kind: type[Batch] = DecodeBatch
        if chunks:
            for chunk in chunks:
                if chunk.last:
                    self._complete(chunk.sequence, ending)
            kind = OneShotBatch if not decodes and all(chunk.sequence.one_shot for chunk in chunks) else MixedBatch
        return kind(chunks, decodes, kv, longest, arrived, ending, cohort.tick)

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        """Take in that a step has run; steps end in the order in which they began. Returns whoever finished.

        `stopped`: those whose answer ended with it, before their limit. What they were given since is taken back.
        """
        if self._share_late and batch.chunks:
            for chunk in batch.chunks:
                self._share(chunk)
            self._stalled = False  # whoever can share these blocks wants fewer
        return self._finish_all(batch.ending, stopped, batch.tick)

    def abort(self, request_id: int, now: float) -> Sequence | None:
        """Take a request back wherever it is; None when nobody of that id is here."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._finish(sequence)
            self.release(sequence)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Free the blocks of a finished sequence that was submitted with `hold`."""
        if sequence in self.held:
            del self.held[sequence]
            self.kv.release(sequence.holding)
            self._stalled = False

    def quiet_steps(self) -> int:
        """How many coming steps are plain decode steps of the same members, without new arrivals; 0 for none known.

        Nobody can be admitted, nobody prefills, nobody reaches a limit, and there are blocks for all. A plant that
        knows when answers end cuts this shorter.
        """
        cohort = self.cohort
        if not cohort.size or self._prefilling or self.arriving or (not self._stalled and self._anybody_waits()):
            return 0
        return cohort.steps_within(self.kv.free, cohort.steps_to_limit() - 1)

    def advance(self, steps: int) -> None:
        """Begin and end `steps` quiet steps at once."""
        self.kv.draw(self.cohort.blocks_within(steps))
        self.cohort.advance(steps)

    def last_step(self, stopped: Iterable[Sequence]) -> list[Sequence]:
        """Begin and end one plain decode step at once, with which members reach their limit or have stopped.

        Quiet steps came before it and there are blocks for it (`lasts`). Returns whoever finished, as `end_step`.
        """
        self.advance(1)
        ending = self.cohort.reach_limits()
        for sequence in ending:
            self._settle(sequence)
        return self._finish_all(ending, stopped, self.cohort.tick)

    def standing_batch(self) -> Batch:
        """The plain decode step that has just been begun by `advance`, for a plant that is a step ahead."""
        cohort = self.cohort
        return DecodeBatch((), tuple(cohort.members), cohort.kv, cohort.longest(), tick=cohort.tick)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def tick(self) -> int:
        """Steps begun so far."""
        return self.cohort.tick

    @property
    def decodes(self) -> int:
        """Sequences that decode."""
        return self.cohort.size

    @property
    def admitted(self) -> int:
        """Requests that have been admitted and have not finished."""
        return len(self.running) + len(self.visiting)

    def lasts(self, steps: int) -> bool:
        """Whether there are blocks for so many further steps of the same decodes."""
        return self.cohort.steps_within(self.kv.free, steps) == steps

    @property
    def waiting(self) -> int:
        """Requests that wait for admission."""
        return sum(len(lane) for lane in self.lanes) + len(self.arriving)

    def check_integrity(self) -> None:
        """Blocks are conserved, the counted sums are those of the sequences, everybody is in one place.

        Raises:
            AssertionError: with the numbers.
        """
        self.cohort.check_integrity()
        everybody = [*self.sequences.values(), *self.held]
        unsettled = 0
        for sequence in self.cohort.members:
            if not sequence.reserved:
                holding = sequence.holding
                unsettled += self.kv.blocks_for(self.cohort.kv_tokens(sequence)) - self.kv.held(holding)
        self.kv.check_integrity([sequence.holding for sequence in everybody], unsettled)
        if len(self.running) > self.config.max_num_seqs:
            raise AssertionError(f"{len(self.running)} sequences run, the limit is {self.config.max_num_seqs}")
        places = self.waiting + len(self.running) + len(self.visiting)
        if places != len(self.sequences):
            raise AssertionError(f"{places} sequences wait or run, {len(self.sequences)} are here")

    # -- one step ----------------------------------------------------------------------------------------------------

    def _welcome(self) -> list[Sequence]:
        """Admit those who come with their cache, as far as seats and blocks go; whoever was preempted goes first."""
        arriving, admitted = self.arriving, []
        while arriving and len(self.running) < self.config.max_num_seqs and not self.lanes[0]:
            sequence = arriving[0]
            prompt = sequence.request.prompt_tokens
            whole = self.config.reserve == "answer"
            if self.kv.blocks_for(prompt + (sequence.limit - 1 if whole else 1)) > self.kv.free:
                break
            self.kv.take(sequence.holding, self.kv.blocks_for(prompt + (sequence.limit - 1 if whole else 0)))
            admitted.append(arriving.popleft())
            sequence.computed, sequence.reserved = prompt, whole
            self.running[sequence] = None
            self.cohort.join(sequence)
        return admitted

    def _anybody_waits(self) -> bool:
        """Whether a lane has anybody."""
        lanes = self.lanes
        return lanes[0].count > 0 or lanes[-1].count > 0

    def _make_room(self, starting: int) -> bool:
        """Blocks for the `starting` decodes that begin one, at the youngest's expense where needed.

        Returns whether anybody lost its own.
        """
        cohort, kv = self.cohort, self.kv
        if starting <= kv.free:
            kv.draw(starting)
            return False
        for sequence in [s for s in self._by_importance() if s.state == DECODING and cohort.is_starting(s)]:
            while sequence.state == DECODING and not kv.free:
                self._preempt(next(s for s in reversed(self._by_importance()) if s.state in (DECODING, PREFILLING)))
            if sequence.state == DECODING:  # it did not fall victim itself
                kv.draw(1)
        return True

    def _by_importance(self) -> list[Sequence]:
        """Who is preempted last comes first: the oldest admission, or by priority where that is the order."""
        return sorted(self.running, key=priority) if self.config.order == "priority" else list(self.running)

    def _fill(self, chunks: list[Chunk], decodes: int, preempted: bool) -> None:
        """Prompt chunks of this step: those under way first, then those who are admitted."""
        budget = self.config.max_num_batched_tokens - decodes
        if self.chunks is not None:
            budget = min(budget, self.chunks.allowance(decodes))
        for sequence in tuple(self._prefilling):
            if budget <= 0:
                break
            tokens = min(sequence.goal - sequence.computed, budget)
            if sequence.one_shot and self.config.one_shot:
                tokens = min(tokens, self.config.one_shot.most_tokens())
            more = self.blocks_wanted(sequence, sequence.computed + tokens)
            if more > self.kv.free:
                self._preempt(sequence)
                preempted = True
                continue
            if more > 0:
                self.kv.take(sequence.holding, more)
            budget -= self.schedule(chunks, sequence, tokens)
        if not preempted and self._anybody_waits():
            lacking = admit(self, chunks, budget)
            # Beside the decodes that these prompts become a policy may allow smaller chunks, which want fewer blocks.
            self._stalled = lacking and (self.chunks is None or not chunks)

    def schedule(self, chunks: list[Chunk], sequence: Sequence, tokens: int) -> int:
        """Put so many tokens of a prompt into the step: for `schedulers.admission`, which has found blocks for them."""
        context = sequence.computed
        last = context + tokens == sequence.goal
        chunk = Chunk(sequence, tokens, context, last)
        chunks.append(chunk)
        sequence.computed += tokens
        if last:
            self._prefilling.pop(sequence, None)
        else:
            self._prefilling[sequence] = None
        if self.config.lead_cold_prefixes:
            self.leading[cold_key(sequence, context // self.kv.node_tokens)] = None
        if not self._share_late and sequence.request.prefix_blocks:
            self._publish(sequence, sequence.computed)
        self.prefill_tokens += tokens
        return tokens

    def _complete(self, sequence: Sequence, ending: list[Sequence]) -> None:
        """The step just begun computes the last of a prompt, and with it the next token."""
        sequence.generated += 1
        if sequence.generated >= sequence.limit:
            sequence.state = ENDING
            sequence.left = self.cohort.tick
            ending.append(sequence)
        else:
            self.cohort.join(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Write down the blocks that the cohort drew for a sequence that has just left it."""
        self._stalled = False  # without it a step may hold a one-shot prompt whole, which then wants no blocks
        if not sequence.reserved:
            sequence.holding.private += self.blocks_wanted(sequence, sequence.computed)

    def blocks_wanted(self, sequence: Sequence, tokens: int) -> int:
        """Blocks that a sequence lacks to have `tokens` tokens cached; below 0, those that it has beyond."""
        kv, holding = self.kv, sequence.holding
        return kv.blocks_for(tokens) - len(holding.nodes) * kv.node_blocks - holding.private

    def _leave(self, sequence: Sequence) -> None:
        """Out of wherever it is, its numbers and blocks written down."""
        if sequence.state == WAITING:
            if sequence in self.arriving:
                self.arriving.remove(sequence)
            else:
                self._lane(sequence).drop(sequence)
        elif sequence.state == DECODING:
            self.cohort.leave(sequence)
            self._settle(sequence)
        elif sequence.state == PREFILLING:
            self._prefilling.pop(sequence, None)
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.visiting.pop(sequence, None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away; it will compute its prompt and what it has generated again."""
        if sequence.state == DECODING:
            sequence.lost = self.cohort.tick
        self._leave(sequence)
        kv, holding = self.kv, sequence.holding
        kv.release(holding, keep=sequence.computed // kv.block_tokens - len(holding.nodes) * kv.node_blocks)
        self._stalled = False
        sequence.state = WAITING
        sequence.goal = sequence.request.prompt_tokens + sequence.generated
        sequence.computed = 0
        sequence.reserved = False
        sequence.preemptions += 1
        self.preemptions += 1
        self._lane(sequence).push(sequence)

    def _finish_all(self, ending: Iterable[Sequence], stopped: Iterable[Sequence], tick: int) -> list[Sequence]:
        """Those who reached their limit in the step of that tick, then those whose answer ended with it."""
        finished: list[Sequence] = []
        for sequence in ending:
            if sequence.state == ENDING:
                self._finish(sequence)
                finished.append(sequence)
        for sequence in stopped:
            if sequence.state != FINISHED:
                self._finish(sequence)
                sequence.generated -= max(sequence.left - tick, 0)
                finished.append(sequence)
        return finished

    def _finish(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.state = FINISHED
        self.load -= sequence.request.prompt_tokens + sequence.limit
        del self.sequences[sequence.request.id]
        if sequence.hold:
            self.held[sequence] = None
        else:
            self.kv.release(sequence.holding)
        self._stalled = False

    def _lane(self, sequence: Sequence) -> WaitingQueue:
        return self.lanes[-1 if sequence.one_shot else 0]

    def _share(self, chunk: Chunk) -> None:
        """A chunk has been computed: let others find its blocks."""
        sequence = chunk.sequence
        if self.config.lead_cold_prefixes:
            self.leading.pop(cold_key(sequence, chunk.context // self.kv.node_tokens), None)
        if sequence.state not in (WAITING, FINISHED):
            self._publish(sequence, chunk.context + chunk.tokens)

    def _publish(self, sequence: Sequence, computed: int) -> None:
        """Let others find a prompt's blocks as far as they are computed; what was generated has no ids."""
        request = sequence.request
        self.kv.publish(sequence.holding, request.prefix_blocks, min(computed, request.prompt_tokens))

    def _check_fits(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.prompt_tokens < 1:
            raise ValueError(f"request {request.id}: expected a prompt of at least 1 token, found none")
        tokens = request.prompt_tokens + (0 if sequence.one_shot else sequence.limit - 1)
        blocks = self.kv.blocks_for(tokens)
        if blocks > self.kv.blocks:
            raise ValueError(
                f"request {request.id}: expected at most {self.kv.blocks} KV blocks, "
                f"{tokens} prompt and output tokens take {blocks}"
            )
