"""The sequences that decode, counted rather than walked.

All of them get one token a step, so a sequence's cached tokens are a constant plus the number of steps so far:
`offset + tick`. What a step needs to know of its decodes (how many tokens they attend to, how many of them start a new
block, who reaches the limit) then follows from a few sums and from the offsets' residues modulo the block size, and a
step costs the same for 4 sequences and for 400. Runs of k steps are as cheap as one.
"""

from __future__ import annotations

from heapq import heappop, heappush

from schedulers.sequence import DECODING, ENDING, Sequence

FAR = 1 << 60
"""More steps than anything takes."""


class Cohort:
    """Decoding sequences of one engine, oldest admission first.

    Attributes:
        tick: steps begun so far. members: who decodes. size, kv: how many, and the tokens that they have cached.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tick = self.size = self.kv = 0
        self.members: dict[Sequence, None] = {}
        self._starts = [0] * block_tokens  # members by the residue of the tick at which they start a block
        self._limits: list[tuple[int, int, Sequence, int]] = []
        self._lengths: list[tuple[int, int, Sequence, int]] = []

    def join(self, sequence: Sequence) -> None:
        """A sequence whose prompt is computed decodes from the next step on."""
        tick = self.tick
        sequence.state = DECODING
        sequence.offset, sequence.joined = sequence.computed - tick, tick
        self.members[sequence] = None
        self.size += 1
        self.kv += sequence.computed
        if not sequence.reserved:
            self._starts[-sequence.offset % self.block_tokens] += 1
        end = tick + sequence.limit - sequence.generated
        heappush(self._limits, (end, sequence.number, sequence, tick))
        heappush(self._lengths, (-sequence.offset, sequence.number, sequence, tick))

    def leave(self, sequence: Sequence) -> None:
        """Write the sequence's own numbers back into it, and count it no longer."""
        sequence.computed = sequence.offset + self.tick
        sequence.generated += self.tick - sequence.joined
        sequence.joined, sequence.left = -1, self.tick
        del self.members[sequence]
        self.size -= 1
        self.kv -= sequence.computed
        if not sequence.reserved:
            self._starts[-sequence.offset % self.block_tokens] -= 1

    def kv_tokens(self, sequence: Sequence) -> int:
        """Cached tokens of a member."""
        return sequence.offset + self.tick

    def generated(self, sequence: Sequence) -> int:
        """Output tokens of a member, those of steps that have begun but not ended included."""
        return sequence.generated + self.tick - sequence.joined

    def starting(self) -> int:
        """Blocks that the next step's tokens start."""
        return self._starts[self.tick % self.block_tokens]

    def is_starting(self, sequence: Sequence) -> bool:
        """Whether a member's next token starts a block."""
        return not sequence.reserved and (sequence.offset + self.tick) % self.block_tokens == 0

    def blocks_within(self, steps: int) -> int:
        """Blocks that the next `steps` steps start, if nobody joins or leaves."""
        starts, size = self._starts, self.block_tokens
        laps, rest = divmod(steps, size)
        first = self.tick % size
        after = first + rest
        drawn = sum(starts[first:after]) if after <= size else sum(starts[first:]) + sum(starts[: after - size])
        return drawn + laps * sum(starts) if laps else drawn

    def steps_within(self, blocks: int, most: int) -> int:
        """How many steps, at most `most`, `blocks` blocks last for."""
        if self.size * (most // self.block_tokens + 1) <= blocks:
            return most
        lap = sum(self._starts)
        if not lap:
            return most
        laps = blocks // lap
        steps, left = laps * self.block_tokens, blocks - laps * lap
        while steps < most:
            left -= self._starts[(self.tick + steps) % self.block_tokens]
            if left < 0:
                break
            steps += 1
        return min(steps, most)

    def steps_to_limit(self) -> int:
        """Steps until the first member reaches its limit, that step included."""
        limits = self._limits
        while limits:
            end, _, sequence, joined = limits[0]
            if sequence.joined == joined and sequence.state == DECODING:
                return end - self.tick
            heappop(limits)
        return FAR

    def longest(self) -> int:
        """Cached tokens of the longest member, 0 without any."""
        lengths = self._lengths
        while lengths:
            negative, _, sequence, joined = lengths[0]
            if sequence.joined == joined and sequence.state == DECODING:
                return self.tick - negative
            heappop(lengths)
        return 0

    def advance(self, steps: int) -> None:
        """Every member gets `steps` tokens."""
        self.tick += steps
        self.kv += steps * self.size

    def reach_limits(self) -> list[Sequence]:
        """Take out those whose last token is in the step just begun."""
        ending: list[Sequence] = []
        limits, tick = self._limits, self.tick
        while limits and limits[0][0] <= tick:
            _, _, sequence, joined = heappop(limits)
            if sequence.joined != joined or sequence.state != DECODING:
                continue
            self.leave(sequence)
            sequence.state = ENDING
            ending.append(sequence)
        return ending

    def check_integrity(self) -> None:
        """The sums are those of the members.

        Raises:
            AssertionError: with the numbers.
        """
        lengths = [self.kv_tokens(sequence) for sequence in self.members]
        if (len(lengths), sum(lengths)) != (self.size, self.kv):
            raise AssertionError(f"{self.size} decodes of {self.kv} tokens, but {len(lengths)} of {sum(lengths)}")
        if max(lengths, default=0) != self.longest():
            raise AssertionError(f"longest is {self.longest()}, but {max(lengths, default=0)}")
        starting = sum(self.is_starting(sequence) for sequence in self.members)
        if starting != self.starting():
            raise AssertionError(f"{self.starting()} blocks start, but {starting}")
