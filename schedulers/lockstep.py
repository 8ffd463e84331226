"""Several schedulers that step together: data-parallel ranks whose experts are spread over all of them.

Every rank has its own requests and its own KV memory. But a layer's experts lie on all ranks, so that no rank can run a
step alone: a rank with nothing to do takes part with an empty batch. To a plant the group looks like one `EngineCore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from schedulers.batches import Batch
from schedulers.engine_core import EngineCore
from schedulers.sequence import Sequence

if TYPE_CHECKING:
    from workloads.request import Request


class GroupBatch(Batch):
    """One step of all ranks: the sums of their batches, and in `ranks` each one's own, None for an idle rank."""

    __slots__ = ("ranks",)

    def __init__(self, ranks: list[Batch | None], tick: int) -> None:
        here = [batch for batch in ranks if batch is not None]
        super().__init__(
            [chunk for batch in here for chunk in batch.chunks],
            [sequence for batch in here for sequence in batch.decodes],
            sum(batch.decode_kv for batch in here),
            max((batch.longest_decode for batch in here), default=0),
            arrived=[sequence for batch in here for sequence in batch.arrived],
            ending=[sequence for batch in here for sequence in batch.ending],
            tick=tick,
        )
        self.ranks = ranks


class LockstepGroup:
    """Ranks in lockstep. A request goes to the rank with the lowest 4 × waiting + running, as vLLM's front end has it.

    Its interface is `EngineCore`'s, as far as a plant uses it.
    """

    def __init__(self, make_core: Callable[[], EngineCore], ranks: int) -> None:
        self.ranks = [make_core() for _ in range(ranks)]
        self._homes: dict[int, EngineCore] = {}
        self._turn = 0

    # -- the plant's calls -------------------------------------------------------------------------------------------

    def submit(
        self, request: Request, now: float, *, limit: int | None = None, computed: bool = False, hold: bool = False
    ) -> Sequence:
        """As `EngineCore.submit`, on the rank that has least to do; ties go round."""
        size = len(self.ranks)
        start, self._turn = self._turn, (self._turn + 1) % size
        order = (self.ranks[(start + i) % size] for i in range(size))
        rank = min(order, key=lambda core: 4 * core.waiting + core.admitted)
        sequence = rank.submit(request, now, limit=limit, computed=computed, hold=hold)
        self._homes[request.id] = rank
        return sequence

    def begin_step(self, now: float) -> GroupBatch | None:
        """As `EngineCore.begin_step`, on every rank; idle ranks keep step."""
        batches = [rank.begin_step(now) for rank in self.ranks]
        if not any(batch is not None for batch in batches):
            return None
        for rank, batch in zip(self.ranks, batches, strict=True):
            if batch is None:
                rank.cohort.advance(1)
        return GroupBatch(batches, self.tick)

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        """As `EngineCore.end_step`."""
        assert isinstance(batch, GroupBatch)
        ended = self._by_home(stopped)
        finished: list[Sequence] = []
        for rank, part in zip(self.ranks, batch.ranks, strict=True):
            if part is not None:
                finished.extend(rank.end_step(part, ended.get(id(rank), ()), now))
        self._forget(finished)
        return finished

    def abort(self, request_id: int, now: float) -> Sequence | None:
        """As `EngineCore.abort`."""
        rank = self._homes.pop(request_id, None)
        return rank.abort(request_id, now) if rank else None

    def release(self, sequence: Sequence) -> None:
        """As `EngineCore.release`."""
        self._homes.pop(sequence.request.id).release(sequence)

    def quiet_steps(self) -> int:
        """As `EngineCore.quiet_steps`: while every rank that is not idle is quiet."""
        busy = [rank for rank in self.ranks if rank.sequences]
        return min((rank.quiet_steps() for rank in busy), default=0)

    def advance(self, steps: int) -> None:
        """As `EngineCore.advance`."""
        for rank in self.ranks:
            rank.advance(steps)

    def last_step(self, stopped: Iterable[Sequence]) -> list[Sequence]:
        """As `EngineCore.last_step`."""
        ended = self._by_home(stopped)
        finished = [sequence for rank in self.ranks for sequence in rank.last_step(ended.get(id(rank), ()))]
        self._forget(finished)
        return finished

    def standing_batch(self) -> Batch:
        """As `EngineCore.standing_batch`."""
        return GroupBatch([rank.standing_batch() if rank.decodes else None for rank in self.ranks], self.tick)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def tick(self) -> int:
        """Steps begun so far, by every rank."""
        return self.ranks[0].tick

    @property
    def decodes(self) -> int:
        """Sequences that decode, on all ranks."""
        return sum(rank.decodes for rank in self.ranks)

    @property
    def waiting(self) -> int:
        """Requests that wait, on all ranks."""
        return sum(rank.waiting for rank in self.ranks)

    @property
    def admitted(self) -> int:
        """Requests that have been admitted and have not finished, on all ranks."""
        return sum(rank.admitted for rank in self.ranks)

    @property
    def load(self) -> int:
        """As `EngineCore.load`, over all ranks."""
        return sum(rank.load for rank in self.ranks)

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Everybody who has been submitted and has not finished, by request id."""
        return {number: sequence for rank in self.ranks for number, sequence in rank.sequences.items()}

    def lasts(self, steps: int) -> bool:
        """As `EngineCore.lasts`."""
        return all(rank.lasts(steps) for rank in self.ranks)

    def _by_home(self, sequences: Iterable[Sequence]) -> dict[int, list[Sequence]]:
        found: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            found.setdefault(id(self._homes[sequence.request.id]), []).append(sequence)
        return found

    def _forget(self, finished: Iterable[Sequence]) -> None:
        for sequence in finished:
            if not sequence.hold:
                del self._homes[sequence.request.id]

    def check_integrity(self) -> None:
        """Each rank's, and that all have taken the same number of steps.

        Raises:
            AssertionError: with the numbers.
        """
        for rank in self.ranks:
            rank.check_integrity()
        ticks = [rank.tick for rank in self.ranks]
        if len(set(ticks)) > 1:
            raise AssertionError(f"ranks have begun {ticks} steps")
