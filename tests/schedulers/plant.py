"""A plant for property tests: it drives one `EngineCore` through a story and checks each step against the contract.

It keeps books of its own: what every request has cached, how many tokens it was given, and how it ended.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from schedulers.admission_control import RequestShed
from schedulers.batches import Batch, DecodeBatch, MixedBatch, OneShotBatch
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.kv_tiers import Load
from schedulers.sequence import FINISHED, Sequence, SubmitOptions
from schedulers.speculation import SpeculativeEngineCore
from schedulers.step_policies import ChunkPolicy
from tests.schedulers.stories import batch_text
from workloads.request import Request

NEVER = 10**6


@dataclass(frozen=True)
class Visit:
    """One request and what becomes of it. It comes at clock `at`; `stop` output tokens end it before its limit.

    `way`: "here" from prompt to answer; "sent": its prompt only, the blocks kept for `kept` turns of the clock;
    "received": its answer only, the cache comes with it. `abort`: turns after `at`, None for never; `in_flight`:
    between the begin and the end of a step.
    """

    at: int
    prompt: int
    limit: int
    ids: tuple[int, ...] = ()
    stop: int = NEVER
    abort: int | None = None
    in_flight: bool = False
    way: str = "here"
    kept: int = 0
    task: str = "generate"
    model: str = "a"
    priority: int = 0
    service_class: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens that it ends with."""
        return min(1 if self.way == "sent" else max(self.limit, 1), max(self.stop, 1 + (self.way == "received")))


def check_ends(plant: Plant, story: list[Visit]) -> None:
    """Check that only visits that abort were aborted, and that those that finished have all their tokens."""
    for id, visit in enumerate(story):
        how, tokens = plant.ends[id]
        assert how != "aborted" or visit.abort is not None
        assert how != "finished" or tokens == visit.tokens


class Plant:
    """One run with up to `depth` steps in flight.

    `leaps`: steady steps are advanced at once instead of being begun. `forgetful`: the core looks at every waiting
    in each step, as if it did not know that they lack blocks. `make`: makes the core. `accept`: draft tokens that are
    that are right, of a request's draft of this many.

    Attributes:
        ends: how each request ended, and with how many tokens. steps: every step told, by the clock, leaps told too.
        attended: of each step, the tokens that its decodes attend to together and at most, and its outputs.
    """

    def __init__(
        self, config: EngineConfig, chunks: ChunkPolicy | None, depth: int, *, leaps: bool = False,
        forgetful: bool = False, make: Callable[[EngineConfig, ChunkPolicy | None], EngineCore] = EngineCore,
        accept: Callable[[int, int], int] = lambda id, drafted: 0,
    ) -> None:  # fmt: skip
        self.core = make(config, chunks)
        self.accept = accept
        self.attended: list[tuple[int, int, int]] = []
        self.model_loads = 0
        self.config = config
        self.chunks = chunks
        self.depth = depth
        self.leaps = leaps
        self.forgetful = forgetful
        self.ends: dict[int, tuple[str, int]] = {}
        self.steps: list[str] = []
        self.visits: list[Visit] = []
        self.cached: dict[int, int] = {}
        self.given: Counter[int] = Counter()
        self.first: list[int] = []  # in the order of their first steps
        self.in_flight: deque[Batch] = deque()
        self.releases: list[tuple[int, Sequence]] = []
        self.loads: list[tuple[int, Load]] = []  # when each has come
        self.quiet: tuple[int, tuple[Sequence, ...]] = (0, ())  # steps that were promised, and with whom

    def run(self, visits: list[Visit]) -> Plant:
        """Play the story to its end: every request has ended, and every block is free."""
        self.visits = visits
        clock, last = 0, max(visit.at for visit in visits)
        maximum = last + 200 + 20 * sum(visit.prompt + visit.limit + visit.kept for visit in visits)
        while self.core.sequences or self.releases or self.in_flight or self.loads or clock <= last:
            self._events(clock)
            clock += self._leap(clock) or self._turn(clock)
            assert clock < maximum, f"somebody starves: {list(self.core.sequences.values())}"
        assert sorted(self.ends) == list(range(len(visits)))
        assert self.core.kv_cache.num_free_blocks == self.config.num_gpu_blocks
        assert self.core.outstanding_tokens == 0
        return self

    # -- what the story does -----------------------------------------------------------------------------------------

    def _events(self, clock: int) -> None:
        for when, sequence in [entry for entry in self.releases if entry[0] <= clock]:
            self.releases.remove((when, sequence))
            self.core.release(sequence)
            self._disturb()
        for when, load in [entry for entry in self.loads if entry[0] <= clock]:
            self.loads.remove((when, load))
            self.core.finish_load(load)
            self._disturb()
        for id, visit in enumerate(self.visits):
            if visit.at == clock:
                self._submit(id, visit)
        self._aborts(clock, in_flight=False)

    def _submit(self, id: int, visit: Visit) -> None:
        request = Request(
            id, 0.0, visit.prompt, visit.limit, visit.model, visit.ids, visit.task, visit.priority,
            tenant=visit.model, ttft_goal=float(visit.priority), service_class=visit.service_class,
        )  # fmt: skip
        is_sent = visit.way == "sent"
        received = visit.way == "received"
        try:
            options = SubmitOptions(1 if is_sent else None, remote_prefill=received, hold_blocks=is_sent)
            before = self.core.outstanding_tokens, self.core.num_waiting
            self.core.submit(request, float(visit.at), options)
        except RequestShed as shed:
            assert shed.retry_after > 0
            assert (self.core.outstanding_tokens, self.core.num_waiting) == before
            self._end(id, "shed")
            return
        except ValueError as error:
            assert "KV blocks" in str(error)
            self._end(id, "rejected")
            return
        self.given[id] = int(received)
        if received:
            self.cached[id] = visit.prompt
        self._disturb()

    def _aborts(self, clock: int, *, in_flight: bool) -> None:
        for id, visit in enumerate(self.visits):
            due = visit.abort is not None and visit.at + visit.abort == clock and visit.in_flight == in_flight
            if due and id in self.core.sequences:
                assert self.core.abort(id, float(clock)) is not None
                assert self.core.abort(id, float(clock)) is None
                self._end(id, "aborted")
                self._disturb()

    def _end(self, id: int, how: str) -> None:
        assert id not in self.ends, f"request {id} ended before: {self.ends[id]}"
        self.ends[id] = how, self.given[id]

    def _disturb(self) -> None:
        self.quiet = 0, ()
        self.core.check_integrity()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _turn(self, clock: int) -> int:
        """Begin a step, and end the oldest if the pipeline is full."""
        core = self.core
        if self.forgetful:
            core.admission_blocked = False
        if core.kv_tiers is not None:
            core.kv_tiers.now = float(clock)
        promised, members = self.quiet
        if core.steady_decode_steps() > promised:
            promised, members = core.steady_decode_steps(), tuple(core.decode_set.sequences)
        batch = core.begin_step(float(clock))
        core.check_integrity()
        self._copy(clock, computed=False)
        self.steps.append(f"{clock}: {batch_text(batch)}")
        if promised:
            assert isinstance(batch, DecodeBatch)
            assert (batch.decodes, batch.chunks, batch.finishing, batch.transferred) == (members, [], [], ())
        self.quiet = max(promised - 1, 0), members
        if batch is not None:
            self._check(batch)
            self.attended.append((batch.decode_kv, batch.longest_decode, batch.outputs))
            self.in_flight.append(batch)
        self._aborts(clock, in_flight=True)
        if len(self.in_flight) == self.depth or (self.in_flight and batch is None):
            self._finish(self.in_flight.popleft(), clock)
        return 1

    def _finish(self, batch: Batch, clock: int) -> None:
        stopped, accepted, emitted = list[Sequence](), list[int](), list[int]()
        drafts = batch.draft_tokens or [0] * len(batch.decodes)
        rows = [*zip(batch.decodes, drafts, strict=True), *((c.sequence, 0) for c in batch.chunks if c.last)]
        for sequence, drafted in rows:
            id = sequence.request.id
            accepted.append(self.accept(id, drafted))
            emitted.append(min(accepted[-1] + 1, self.visits[id].tokens - self.given[id]))
            if sequence.state != FINISHED:
                self.given[id] += emitted[-1]
                if self.given[id] == self.visits[id].tokens:
                    stopped.append(sequence)
        if isinstance(self.core, SpeculativeEngineCore):
            self.core.record_outputs(batch, accepted, emitted)
        finished = self.core.end_step(batch, stopped, float(clock + 1))
        self._copy(clock, computed=True)
        assert {sequence.request.id for sequence in finished} == {sequence.request.id for sequence in stopped}
        for sequence in finished:
            id = sequence.request.id
            self._end(id, "finished")
            assert sequence.num_output_tokens == self.given[id] == self.visits[id].tokens
            if sequence.hold_blocks:
                self.releases.append((clock + 1 + self.visits[id].kept, sequence))
        if finished or batch.chunks or batch.transferred:
            self._disturb()

    def _copy(self, clock: int, *, computed: bool) -> None:
        """Copy to tiers at once or in three turns of the clock, and from them in as many turns as blocks."""
        tiers = self.core.kv_tiers
        if tiers is None:
            return
        for store in tiers.take_stores(computed):
            assert store.block.ready_at > clock
            store.block.ready_at = clock + 3 * (store.block.depth % 2)
        for load in tiers.take_loads():
            self.loads.append((clock + len(load.sources), load))
        self.core.check_integrity()

    def _leap(self, clock: int) -> int:
        """Take steady steps at once, as far as the story leaves the engine alone; how many, 0 where it has to walk."""
        core = self.core
        if not self.leaps or self.in_flight:
            return 0
        dates = [visit.at for visit in self.visits] + [when for when, _ in (*self.releases, *self.loads)]
        dates += [visit.at + visit.abort for visit in self.visits if visit.abort is not None]
        members = list(core.decode_set.sequences)
        remaining = [self.visits[member.request.id].tokens - self.given[member.request.id] - 1 for member in members]
        steps = min([core.steady_decode_steps(), *remaining, *(date - clock for date in dates if date > clock)])
        if steps < 2 or any(date == clock for date in dates):  # whatever happens at this instant may be in flight
            return 0
        tiers = core.kv_tiers
        if tiers is None:
            core.advance(steps)
        else:
            for i in range(steps):  # a block that is evicted leaves for a tier at that instant
                tiers.now = float(clock + i)
                core.advance(1)
                self._copy(clock + i, computed=False)
        self.quiet = max(self.quiet[0] - steps, 0), self.quiet[1]
        core.check_integrity()
        self.steps += [
            f"{clock + i}: decode | {' '.join(str(member.request.id) for member in members)}" for i in range(steps)
        ]
        for member in members:
            self.given[member.request.id] += steps
        return steps

    # -- what a step must be -----------------------------------------------------------------------------------------

    def _check(self, batch: Batch) -> None:
        config, decodes = self.config, len(batch.decodes)
        single = config.max_num_batched_tokens - decodes
        if self.chunks is not None:
            single = min(single, self.chunks.max_prefill_tokens(decodes))
        assert batch.tokens <= config.max_num_batched_tokens
        assert not batch.chunks or batch.prefill_tokens <= single
        assert decodes <= config.max_num_seqs
        everybody = [*batch.decodes, *(chunk.sequence for chunk in batch.chunks)]
        assert len(set(everybody)) == len(everybody), "twice in one step"
        one_shot = [chunk for chunk in batch.chunks if chunk.sequence.one_shot]
        kind = MixedBatch if batch.chunks else DecodeBatch
        assert type(batch) is (OneShotBatch if one_shot and len(one_shot) == len(everybody) else kind)
        self._check_chunks(batch)
        self.model_loads += len(batch.loads)
        assert self.model_loads == self.core.model_loads
        if config.model_slots is not None:
            models = {sequence.request.model for sequence in everybody} - {config.model_slots.base}
            assert len(models) <= (1 if config.model_slots.exclusive else config.model_slots.slots)
        if config.one_shot is not None:
            maximum = config.one_shot.max_step_tokens()
            assert sum(chunk.tokens for chunk in one_shot) <= maximum
            assert len(one_shot) <= config.one_shot.sequences
            assert len({(chunk.sequence.request.model, chunk.sequence.request.task) for chunk in one_shot}) <= 1
            for chunk in one_shot:  # cut only where no step could take it whole
                fresh = chunk.context == chunk.sequence.num_cached_tokens
                assert (
                    not fresh
                    or chunk.last
                    or chunk.sequence.num_tokens_to_compute - chunk.context > min(maximum, single)
                )

    def _check_chunks(self, batch: Batch) -> None:
        for sequence in batch.decodes:
            id = sequence.request.id
            assert self.cached[id] >= self.visits[id].prompt
            self.cached[id] += 1
        for chunk in batch.chunks:
            id, sequence = chunk.sequence.request.id, chunk.sequence
            if chunk.context == sequence.num_cached_tokens:  # begun, or begun again after it lost its cache
                assert self.config.enable_prefix_caching or not chunk.context
            else:
                assert chunk.context == self.cached[id]
            assert chunk.tokens > 0
            assert chunk.last == (chunk.context + chunk.tokens == sequence.num_tokens_to_compute)
            self.cached[id] = chunk.context + chunk.tokens
            if id not in self.first:
                self.first.append(id)
