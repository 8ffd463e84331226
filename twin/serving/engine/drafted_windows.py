"""Fast-forwarding of speculative steps: what coming steps emit is drawn at once, and they are passed over.

Which draft tokens are right depends on a request and the position in its answer, not on the time or the batch. So the
draws of coming steps can be made before any of them has begun, up to the one with which a sequence finishes; then their
sizes are known, and the step-time model gives all durations. An arrival cuts a window as any other: what was drawn
beyond is dropped, and drawn again with the same result.
"""

from __future__ import annotations

from collections import deque

from mypy_extensions import i64

from latency_models.step_time import StepTime
from schedulers.batches import DraftedDecode, DraftedSteps
from schedulers.engine_core import EngineCore
from schedulers.parallel_cores import LockstepGroup
from schedulers.sequence import Sequence
from schedulers.speculation import SpeculativeEngineCore
from twin.serving.engine.fast_forward import FastForward, RunningStep, Window
from twin.serving.engine.speculation import PROPOSALS, SimulatedSpeculation, uniform
from twin.serving.engine.step_records import AnswerEnds
from twin.serving.records.engine_log import EngineLog
from twin.serving.records.requests import RequestRecord


class Course:
    """One decode on its course through coming steps.

    Attributes:
        decode: what it does. shares: the share of drafts whose token at each position is right.
        high, low: halves of its key for draws. position: of the next token in the answer.
        left: tokens of the answer that it has not yet. room: tokens that it may have by `max_tokens`.
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
    """Opens and closes the windows of an engine that speculates.

    Args:
        log, running, answer_ends, step_time: as in `FastForward`.
        speculation: the outcomes of the engine's drafts.
    """

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

    def open(self, core: EngineCore | LockstepGroup, now: float) -> Window | None:
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

    def _run(self, core: EngineCore | LockstepGroup, steps: int, finishes: bool) -> list[Sequence]:
        assert isinstance(core, SpeculativeEngineCore)
        foreseen, speculation = core.foreseen, self._speculation
        assert foreseen is not None, "the steps of a window are foreseen"
        if steps < len(foreseen.rows):
            core.foreseen = foresee(core, speculation, foreseen.draft_tokens, steps)
        finished = core.run_foreseen()
        speculation.ended(finished)
        return finished
