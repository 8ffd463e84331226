"""A request while a scheduler works on it, and the decoding ones of an engine, kept as sums.

Every decode gets one token a step, so its cached tokens are a constant plus the number of steps so far:
`kv_offset + step_index`. The counts that a step needs of its decodes (tokens attended to, blocks started, sequences
that reach their limit) follow from a few sums and from the offsets modulo the block size. A step therefore costs the
same for 4 sequences and for 400, and k steps cost as much as one.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import cycle, islice
from typing import Final, NamedTuple

from schedulers.kv_cache import SequenceBlocks
from workloads.request import Request

WAITING: Final = 0
PREFILLING: Final = 1
DECODING: Final = 2
FINISHING: Final = 3
FINISHED: Final = 4
"""States. FINISHING: the last token is computed by a step that has begun and not ended; slot and blocks are kept."""


class SubmitOptions(NamedTuple):
    """Options with which a request is submitted to an engine.

    Attributes:
        max_tokens: output tokens after which to end it, in place of the request's own (1 on a prefill engine).
        remote_prefill: a prefill engine has computed its prompt's cache and its first token. It may have been reserved.
        hold_blocks: keep its blocks when it has finished, until `release`.
        never_shed: it was accepted before, by an engine that has failed.
    """

    max_tokens: int | None = None
    remote_prefill: bool = False
    hold_blocks: bool = False
    never_shed: bool = False


PLAIN: Final = SubmitOptions()


class Sequence:
    """One request in one engine. `EngineCore` owns and changes it; a backend reads it and may set `payload`.

    Attributes:
        seq_id: position in the order of submission; breaks ties in every order. queue_index: the same at first; a
            new one where the scheduler looks at it late (`scheduler_recv_interval`) or queues it again behind others.
        num_tokens_to_compute: tokens that its prefill computes: the prompt, and after a preemption the generated tokens
            as well.
        num_computed_tokens: tokens in the KV cache. Not updated while the sequence decodes: ask the `DecodeSet`.
        num_output_tokens: output tokens whose step has begun. Not updated while the sequence decodes either.
        max_tokens: output tokens after which the scheduler ends it; at least 1, since a request without output runs
            one step too.
        num_cached_tokens: prompt tokens that the prefix cache supplied at the latest admission.
        blocks: its KV blocks. hold_blocks: keep them when it has finished, until they are transferred.
        kv_offset, joined_step, left_step: bookkeeping of `DecodeSet`; `left_step` is the step at which it last left.
        blocks_reserved: blocks for the whole output were allocated at admission.
        admission_index: position in the order of admissions, the latest one of this sequence.
        preemptions: times that it was preempted. preempted_step: step of its latest token when it was last preempted
            while decoding.
        prefix_loaded: its prefix was loaded from tiers below the device since it was queued.
        charged_output_tokens: output tokens that a fair order has charged to its tenant; -1 before its prompt is.
        one_shot: runs as one-shot work: a single forward pass without a decode slot.
    """

    __slots__ = (
        "admission_index", "blocks", "blocks_reserved", "charged_output_tokens", "hold_blocks", "joined_step",
        "kv_offset", "left_step", "max_tokens", "num_cached_tokens", "num_computed_tokens", "num_output_tokens",
        "num_tokens_to_compute", "one_shot", "payload", "preempted_step", "preemptions", "prefix_loaded", "queue_index",
        "request", "seq_id", "state",
    )  # fmt: skip

    def __init__(self, request: Request, seq_id: int, one_shot: bool) -> None:
        self.request = request
        self.seq_id = self.queue_index = seq_id
        self.one_shot = one_shot
        self.state = WAITING
        self.num_tokens_to_compute = request.prompt_tokens
        self.max_tokens = max(request.max_tokens, 1)
        self.num_computed_tokens = self.num_output_tokens = self.num_cached_tokens = self.preemptions = 0
        self.admission_index = 0
        self.kv_offset = self.joined_step = self.left_step = self.preempted_step = 0
        self.hold_blocks = self.prefix_loaded = False
        self.blocks = SequenceBlocks()
        self.blocks_reserved = False
        self.charged_output_tokens = -1
        self.payload: object = None

    def __repr__(self) -> str:
        state = ("waiting", "prefilling", "decoding", "finishing", "finished")[self.state]
        computed = f"{self.num_computed_tokens}/{self.num_tokens_to_compute} computed"
        return f"Sequence({self.request.id}, {state}, {computed}, {self.num_output_tokens} generated)"


def uncached_prefix_key(sequence: Sequence, num_cached_nodes: int) -> int:
    """The first prefix id that is not cached: a leader computes it, and its followers wait for it."""
    ids = sequence.request.prefix_blocks
    return ids[num_cached_nodes] if num_cached_nodes < len(ids) else -1 - sequence.seq_id


UNLIMITED_STEPS = 1 << 60
"""More steps than any run takes."""


class DecodeSet:
    """Decoding sequences of one engine, oldest admission first. `step_index`: steps begun so far.

    `size`, `kv_tokens`: the number of sequences, and their cached tokens together.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.step_index = self.size = self.kv_tokens = 0
        self.sequences: dict[Sequence, None] = {}
        # Sequences that start a block at the steps of each residue modulo the block size.
        self._block_starts = [0] * block_size
        # Heaps of (key, seq_id, sequence, step at which it was added); entries of removed sequences are skipped.
        self._by_last_step: list[tuple[int, int, Sequence, int]] = []
        self._by_length: list[tuple[int, int, Sequence, int]] = []

    def add(self, sequence: Sequence) -> None:
        """Let a sequence whose prompt is computed decode from the next step on."""
        step = self.step_index
        sequence.state = DECODING
        sequence.kv_offset = sequence.num_computed_tokens - step
        sequence.joined_step = step
        self.sequences[sequence] = None
        self.size += 1
        self.kv_tokens += sequence.num_computed_tokens
        if not sequence.blocks_reserved:
            self._block_starts[-sequence.kv_offset % self.block_size] += 1
        last_step = step + sequence.max_tokens - sequence.num_output_tokens
        heappush(self._by_last_step, (last_step, sequence.seq_id, sequence, step))
        heappush(self._by_length, (-sequence.kv_offset, sequence.seq_id, sequence, step))
        if len(self._by_length) > 8 * self.size + 64:  # decodes that paused or left must not pile up
            self._by_last_step = [entry for entry in self._by_last_step if entry[2].joined_step == entry[3]]
            heapify(self._by_last_step)
            self._by_length = [entry for entry in self._by_length if entry[2].joined_step == entry[3]]
            heapify(self._by_length)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out and write its own counts back into it."""
        sequence.num_computed_tokens = sequence.kv_offset + self.step_index
        sequence.num_output_tokens += self.step_index - sequence.joined_step
        sequence.joined_step = -1
        sequence.left_step = self.step_index
        del self.sequences[sequence]
        self.size -= 1
        self.kv_tokens -= sequence.num_computed_tokens
        if not sequence.blocks_reserved:
            self._block_starts[-sequence.kv_offset % self.block_size] -= 1

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Cached tokens of a decoding sequence."""
        return sequence.kv_offset + self.step_index

    def num_output_tokens(self, sequence: Sequence) -> int:
        """Output tokens of a decoding sequence, those of steps under way included."""
        return sequence.num_output_tokens + self.step_index - sequence.joined_step

    def num_new_blocks(self) -> int:
        """Blocks that the tokens of the next step start."""
        return self._block_starts[self.step_index % self.block_size]

    def needs_block(self, sequence: Sequence) -> bool:
        """Tell whether the next token of a decoding sequence starts a block."""
        return not sequence.blocks_reserved and (sequence.kv_offset + self.step_index) % self.block_size == 0

    def num_new_blocks_within(self, steps: int) -> int:
        """Blocks that the next `steps` steps start while the set stays as it is."""
        starts, size = self._block_starts, self.block_size
        laps, remainder = divmod(steps, size)
        first = self.step_index % size
        after = first + remainder
        started = sum(starts[first:after]) if after <= size else sum(starts[first:]) + sum(starts[: after - size])
        return started + laps * sum(starts) if laps else started

    def num_new_blocks_by_step(self, steps: int) -> list[int]:
        """Blocks that each of the next `steps` steps starts while the set stays as it is."""
        starts, first = self._block_starts, self.step_index % self.block_size
        return list(islice(cycle(starts[first:] + starts[:first]), steps))

    def steps_within_blocks(self, num_blocks: int, max_steps: int) -> int:
        """Steps, at most `max_steps`, for which `num_blocks` blocks suffice."""
        if self.size * (max_steps // self.block_size + 1) <= num_blocks:
            return max_steps
        lap = sum(self._block_starts)
        if not lap:
            return max_steps
        laps = num_blocks // lap
        steps, remainder = laps * self.block_size, num_blocks - laps * lap
        while steps < max_steps:
            remainder -= self._block_starts[(self.step_index + steps) % self.block_size]
            if remainder < 0:
                break
            steps += 1
        return min(steps, max_steps)

    def steps_to_max_tokens(self) -> int:
        """Steps until the first sequence reaches its `max_tokens`, that step included."""
        heap = self._by_last_step
        while heap:
            last_step, _, sequence, joined_step = heap[0]
            if sequence.joined_step == joined_step and sequence.state == DECODING:
                return last_step - self.step_index
            heappop(heap)
        return UNLIMITED_STEPS

    def longest(self) -> int:
        """Cached tokens of the longest sequence, 0 without any."""
        heap = self._by_length
        while heap:
            negative, _, sequence, joined_step = heap[0]
            if sequence.joined_step == joined_step and sequence.state == DECODING:
                return self.step_index - negative
            heappop(heap)
        return 0

    def advance(self, steps: int) -> None:
        """Give every sequence `steps` tokens."""
        self.step_index += steps
        self.kv_tokens += steps * self.size

    def pop_finishing(self) -> list[Sequence]:
        """Remove and return the sequences whose last token is computed by the step just begun."""
        finishing: list[Sequence] = []
        heap, step = self._by_last_step, self.step_index
        while heap and heap[0][0] <= step:
            _, _, sequence, joined_step = heappop(heap)
            if sequence.joined_step != joined_step or sequence.state != DECODING:
                continue
            self.remove(sequence)
            sequence.state = FINISHING
            finishing.append(sequence)
        return finishing

    def check_integrity(self) -> None:
        """Compare the sums with those of the sequences."""
        lengths = [self.num_computed_tokens(sequence) for sequence in self.sequences]
        if (len(lengths), sum(lengths)) != (self.size, self.kv_tokens):
            raise AssertionError(
                f"{self.size} decodes of {self.kv_tokens} tokens, but {len(lengths)} of {sum(lengths)}"
            )
        if max(lengths, default=0) != self.longest():
            raise AssertionError(f"longest is {self.longest()}, but {max(lengths, default=0)}")
        starting = sum(self.needs_block(sequence) for sequence in self.sequences)
        if starting != self.num_new_blocks():
            raise AssertionError(f"{self.num_new_blocks()} blocks start, but {starting}")
