"""Simulated speculation: which draft tokens are right is drawn, by the acceptance that the scenario states.

That is shares by position, or the outcomes of measured answers (`twin.serving.engine.draft_outcomes`), one of which is
drawn for each request. A draw depends on the run's seed, the request and the position in its answer, and on nothing
else: not on the engine, the batch or the number of draft tokens. Simulations that differ in one setting are therefore
compared on the same luck.

So the draws of coming steps can be made before any of them has begun, up to the one with which a sequence finishes;
then their sizes are known, and the step-time model gives all durations (`DraftedWindows`). An arrival cuts a window as
any other: what was drawn beyond is dropped, and drawn again with the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from latency_models.step_time import StepTime
from schedulers.batches import Batch, DraftedDecode, DraftedSteps
from schedulers.parallel_cores import Core
from schedulers.sequence import DECODING, Sequence
from schedulers.speculation import AnswerDrafts, SpeculationStats, SpeculativeEngineCore
from twin.process import runs_compiled
from twin.serving.engine.fast_forward import AnswerEnds, FastForward, RunningStep, Window
from twin.serving.records.engine_log import EngineLog
from twin.serving.records.requests import RequestRecord

if TYPE_CHECKING:
    from twin.serving.engine.draft_outcomes import DraftOutcomes

PROPOSALS: Final = 1 << 40
"""Sets proposals apart from the positions of answers, so that both are independent."""


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of drafts.

    Attributes:
        by_position: the share of drafts whose token at each position is accepted; it does not rise.
        by_model: the same for requests of some models.
        proposed: the share of decodes that have a draft at all.
        measured: outcomes of measured answers, in place of all shares; None: the shares.
    """

    by_position: tuple[float, ...]
    by_model: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    proposed: float = 1.0
    measured: DraftOutcomes | None = None

    def of(self, model: str) -> tuple[float, ...]:
        """The shares for a model's requests."""
        return self.by_model.get(model, self.by_position)


class SimulatedSpeculation:
    """The outcomes of one engine's drafts. `stats`: counters of the engine; outages do not reset them."""

    def __init__(self, acceptance: Acceptance, num_speculative_tokens: int, seed: int) -> None:
        self.acceptance = acceptance
        self._seed = mixed(seed + 1)
        self._keys: dict[int, int] = {}  # of requests that have drawn, until they end
        self._answers = [] if acceptance.measured is None else acceptance.measured.answers
        self.stats = SpeculationStats(num_speculative_tokens)

    def attach(self, core: Core) -> None:
        """Have a new scheduler ask for drafts here, and count here."""
        assert isinstance(core, SpeculativeEngineCore)
        core.propose = self._propose
        core.stats = self.stats
        self._keys.clear()

    def stopped(self, core: Core, batch: Batch) -> list[Sequence]:
        """Tell the scheduler what a step has decoded. Returns the sequences whose answers end with it."""
        assert isinstance(core, SpeculativeEngineCore)
        stopped: list[Sequence] = []
        accepted, emitted = [], []
        for sequence, drafted in zip(batch.decodes, batch.draft_tokens, strict=True):
            right = self._num_accepted(sequence, drafted) if drafted else 0
            remaining = _tokens_left(sequence)
            accepted.append(right)
            emitted.append(min(right + 1, remaining))
            if right + 1 >= remaining:
                stopped.append(sequence)
        for chunk in batch.chunks:
            if chunk.last and chunk.sequence.state == DECODING and _tokens_left(chunk.sequence) <= 0:
                stopped.append(chunk.sequence)
        core.record_outputs(batch, accepted, emitted)
        self.ended(stopped)
        return stopped

    def ended(self, stopped: list[Sequence]) -> None:
        """Forget requests whose answers have ended."""
        for sequence in stopped:
            self._keys.pop(sequence.request.id, None)

    def key(self, number: int) -> int:
        """The 64 bits that all draws for a request depend on."""
        key = self._keys.get(number)
        if key is None:
            key = self._keys[number] = mixed(self._seed ^ number)
        return key

    def _propose(self, sequence: Sequence, max_tokens: int) -> int:
        if self._answers:
            answer, place = self._measured(sequence)
            return min(answer.drafted[place], max_tokens)
        proposed = self.acceptance.proposed
        if proposed < 1.0 and self._uniform(sequence, PROPOSALS) >= proposed:
            return 0
        return max_tokens

    def _num_accepted(self, sequence: Sequence, drafted: int) -> int:
        """The draft tokens that are right: the first whose share is not above a draw."""
        if self._answers:
            answer, place = self._measured(sequence)
            return min(answer.right[place], drafted)
        draw = self._uniform(sequence, 0)
        shares = self.acceptance.of(sequence.request.model)
        right = 0
        while right < drafted and draw < shares[right]:
            right += 1
        return right

    def _uniform(self, sequence: Sequence, stream: int) -> float:
        """A number from [0, 1) for this request and position of its answer."""
        key = self.key(sequence.request.id)
        return uniform(key >> 32, key & 0xFFFFFFFF, _position(sequence) + stream)

    def _measured(self, sequence: Sequence) -> tuple[AnswerDrafts, int]:
        """The measured answer that was drawn for a request, and the place of its position there.

        Beyond the end of an answer its second half comes again and again.
        """
        answer = self._answers[self.key(sequence.request.id) % len(self._answers)]
        size, place = len(answer.drafted), _position(sequence)
        if place >= size:
            half = size // 2
            place = half + (place - size) % (size - half)
        return answer, place


def _position(sequence: Sequence) -> int:
    """Tokens of its answer that a sequence has."""
    record: RequestRecord = sequence.payload  # type: ignore[assignment]
    return record.delivered + sequence.num_output_tokens


def _tokens_left(sequence: Sequence) -> int:
    """Tokens of its answer that a sequence has not yet."""
    record: RequestRecord = sequence.payload  # type: ignore[assignment]
    return record.answer_tokens - record.delivered - sequence.num_output_tokens


def describe_speculation(stats: Many[SpeculationStats]) -> dict[str, object]:
    """Counters together, and what they mean.

    `acceptance_rate`: accepted draft tokens over draft tokens. `mean_acceptance_length`: tokens that a decode with a
    draft emits, its own included. Both are vLLM's definitions. `tokens_per_decode`: tokens that a decode emits in a
    step, with a draft or without.
    """
    drafts = sum(counts.num_drafts for counts in stats)
    tokens = sum(counts.num_draft_tokens for counts in stats)
    accepted = sum(counts.num_accepted_tokens for counts in stats)
    decodes = sum(counts.num_decodes for counts in stats)
    emitted = sum(counts.num_emitted_tokens for counts in stats)
    by_position = [
        sum(counts)
        for counts in zip_longest(*(counters.num_accepted_tokens_per_pos for counters in stats), fillvalue=0)
    ]
    return {
        "num_drafts": drafts,
        "num_draft_tokens": tokens,
        "num_accepted_tokens": accepted,
        "acceptance_rate": accepted / tokens if tokens else None,
        "mean_acceptance_length": 1.0 + accepted / drafts if drafts else None,
        "num_accepted_tokens_per_pos": by_position,
        "num_decodes": decodes,
        "num_emitted_tokens": emitted,
        "tokens_per_decode": emitted / decodes if decodes else None,
    }


_MASK: Final = (1 << 64) - 1
_LOW: Final = 0xFFFFFFFF
_SHORT: Final = 0xFFFF
_COMPILED: Final = runs_compiled()


def mixed(number: int) -> int:
    """SplitMix64's output function: 64 bits in which every bit of `number` matters."""
    bits = (number * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def uniform(high: i64, low: i64, position: i64) -> float:
    """A number from [0, 1) for a key, given as its halves of 32 bits, and a position, not negative."""
    return _by_halves(high, low, position) if _COMPILED else mixed(((high << 32) | low) + position) / 2.0**64


def _by_halves(high: i64, low: i64, position: i64) -> float:
    """`mixed` in machine integers, which hold products of 32 and 16 bits. Compiled, it takes a tenth of the time."""
    low += position & _LOW
    high = (high + (position >> 32) + (low >> 32)) & _LOW
    high, low = _product(high, low & _LOW, 0x9E37, 0x79B9, 0x7F4A, 0x7C15)
    low ^= ((high << 2) & _LOW) | (low >> 30)
    high, low = _product(high ^ (high >> 30), low, 0xBF58, 0x476D, 0x1CE4, 0xE5B9)
    low ^= ((high << 5) & _LOW) | (low >> 27)
    high, low = _product(high ^ (high >> 27), low, 0x94D0, 0x49BB, 0x1331, 0x11EB)
    low ^= ((high << 1) & _LOW) | (low >> 31)
    return (float(high ^ (high >> 31)) * 2.0**32 + float(low)) / 2.0**64


def _product(high: i64, low: i64, a: i64, b: i64, c: i64, d: i64) -> tuple[i64, i64]:
    """The halves of a number times another one, which is given as `a` to `d` of 16 bits each, modulo 2⁶⁴."""
    first = low * d
    second = low * c + (first >> 16)
    by_low = low * b + ((low * a & _SHORT) << 16)  # beyond 64 bits nothing counts
    by_high = high * d + ((high * c & _SHORT) << 16)
    return ((second >> 16) + by_low + by_high) & _LOW, ((second & _SHORT) << 16) | (first & _SHORT)


class Course:
    """One decode on its course through coming steps.

    Attributes:
        shares: the share of drafts whose token at each position is right. high, low: halves of its key for draws.
        position: of the next token in the answer. left: tokens of the answer that it has not yet. room: tokens that it
            may have by `max_tokens`.
        computed: cached tokens. reach: of them, those that its drafts needed room for at most. held: those that its
            blocks have room for.
    """

    __slots__ = ("computed", "decode", "held", "high", "left", "low", "position", "reach", "room", "shares")

    def __init__(self, sequence: Sequence, shares: tuple[float, ...], key: int, num_slots: int) -> None:
        record: RequestRecord = sequence.payload  # type: ignore[assignment]
        self.decode = DraftedDecode(sequence)
        self.shares = shares
        self.high: i64 = key >> 32
        self.low: i64 = key & 0xFFFFFFFF
        self.position: i64 = record.delivered + sequence.num_output_tokens
        self.left: i64 = record.answer_tokens - record.delivered - sequence.num_output_tokens
        self.room: i64 = sequence.max_tokens - sequence.num_output_tokens
        self.computed: i64 = sequence.num_computed_tokens
        self.reach: i64 = sequence.num_computed_tokens
        self.held: i64 = num_slots

    def num_drafted(self, max_drafted: i64, proposed: float) -> i64:
        """Draft tokens in the next step, at most `most`. `proposed`: see `Acceptance`."""
        drafted = min(max_drafted, self.room - 1)
        if drafted > 0 and proposed < 1.0 and uniform(self.high, self.low, self.position + PROPOSALS) >= proposed:
            return 0
        return drafted

    def num_right(self, drafted: i64) -> i64:
        """Draft tokens that are right, of `drafted`, at least 1."""
        draw, shares, right = uniform(self.high, self.low, self.position), self.shares, i64(0)
        while right < drafted and draw < shares[right]:
            right += 1
        return right

    def emit(self, right: i64) -> None:
        """Have a step behind it in which this many draft tokens were right."""
        emitted = min(right + 1, self.left)
        self.position += emitted
        self.computed += emitted
        self.room -= emitted
        self.left -= emitted

    def end(self) -> None:
        """Note what it did in all steps together."""
        decode = self.decode
        decode.num_tokens = self.computed - decode.sequence.num_computed_tokens
        decode.reach = self.reach
        decode.stops = self.left <= 0


def foresee(core: SpeculativeEngineCore, speculation: SimulatedSpeculation, drafts: int, steps: int) -> DraftedSteps:
    """Foresee coming steps: `steps` of them, or fewer if a sequence finishes or blocks may run out.

    `drafts`: the scheduler's `steady_draft_tokens`.
    """
    acceptance, kv_cache = speculation.acceptance, core.kv_cache
    proposed, max_drafted, block_size = acceptance.proposed, i64(drafts), i64(kv_cache.block_size)
    courses: list[Course] = []
    for sequence in core.decode_set.sequences:
        request = sequence.request
        num_slots = kv_cache.num_blocks_of(sequence.blocks) * kv_cache.block_size
        courses.append(Course(sequence, acceptance.of(request.model), speculation.key(request.id), num_slots))
    foreseen = DraftedSteps([course.decode for course in courses], drafts)
    free = i64(kv_cache.num_free_blocks + core.blocks_allocated_ahead)
    reserve, verified = i64(core.blocks_of_drafted_step(drafts)), i64(0)
    while free >= reserve and len(foreseen.rows) < steps and not foreseen.finishes:
        rows: i64 = 0
        kv_tokens: i64 = 0
        longest: i64 = 0
        new_blocks: i64 = 0
        for course in courses:
            drafted = course.num_drafted(max_drafted, proposed)
            attended = course.computed + 1 + drafted
            rows += 1 + drafted
            kv_tokens += attended
            longest = max(longest, attended)
            course.reach = max(course.reach, attended)
            if attended > course.held:
                blocks = (attended - course.held + block_size - 1) // block_size
                new_blocks += blocks
                course.held += blocks * block_size
            right: i64 = 0
            if drafted > 0:
                right = course.num_right(drafted)
                verified += drafted
                foreseen.num_accepted[right] += 1
            course.decode.num_drafted.append(drafted)
            course.emit(right)
            if course.left <= 0 or course.room <= 0:
                foreseen.finishes = True
        foreseen.rows.append(rows)
        foreseen.kv_tokens.append(kv_tokens)
        foreseen.longest.append(longest)
        foreseen.new_blocks.append(new_blocks)
        free -= new_blocks
    foreseen.num_draft_tokens = verified
    for course in courses:
        course.end()
    return foreseen


class DraftedWindows(FastForward):
    """Opens and closes the windows of an engine that speculates."""

    def __init__(
        self,
        log: EngineLog,
        running: deque[RunningStep],
        answer_ends: AnswerEnds,
        step_time: StepTime,
        speculation: SimulatedSpeculation,
    ) -> None:
        super().__init__(log, running, answer_ends, step_time)
        self._speculation = speculation

    def open(self, core: Core, now: float) -> Window | None:
        """A window from now on if coming steps only verify drafts of the same decodes; else None."""
        assert isinstance(core, SpeculativeEngineCore)
        drafts = core.steady_draft_tokens()
        if drafts < 0:
            return None
        foreseen = foresee(core, self._speculation, drafts, self._longest)
        steps = len(foreseen.rows)
        if not steps:
            return None
        core.foreseen = foreseen
        end = now
        ends = [end := end + seconds for seconds in self._step_time.drafted_seconds(foreseen)]
        return Window(now, ends, steps, foreseen.finishes)

    def _run(self, core: Core, steps: int, finishes: bool) -> list[Sequence]:
        assert isinstance(core, SpeculativeEngineCore)
        foreseen, speculation = core.foreseen, self._speculation
        assert foreseen is not None, "the steps of a window are foreseen"
        if steps < len(foreseen.rows):
            core.foreseen = foresee(core, speculation, foreseen.draft_tokens, steps)
        finished = core.run_foreseen()
        speculation.ended(finished)
        return finished
