"""An engine's scheduler whose decisions are another program's, such as the installed vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from schedulers.admission import start_prefill
from schedulers.batches import Batch, Chunk
from schedulers.engine_config import EngineConfig
from schedulers.engine_core import EngineCore
from schedulers.sequence import PLAIN, PREFILLING, WAITING, Sequence, SubmitOptions
from workloads.request import Request


class ScheduledRequest(NamedTuple):
    """A request in a step: its id, the tokens that it computes, and those that were in the cache before."""

    request_id: int
    num_tokens: int
    num_computed_tokens: int


class HostedScheduler(Protocol):
    """A scheduler that decides for `HostedCore`. Requests go by their ids."""

    def add(self, request: Request, max_tokens: int) -> None:
        """Queue a request."""

    def schedule(self) -> tuple[list[int], list[ScheduledRequest]]:
        """Begin a step: the requests preempted for it, and those that run, oldest admission first."""

    def end_step(self, stopped: set[int]) -> None:
        """End the oldest step that has begun. The answers of `stopped` end with it, before their limit."""

    def abort(self, request_id: int) -> None:
        """Drop a request."""

    def cached_prefix_tokens(self, request: Request) -> int:
        """Leading prompt tokens of a request that are in its prefix cache."""

    def num_free_blocks(self) -> int: ...
    def num_unfinished(self) -> int: ...


class HostedCore(EngineCore):
    """An engine's scheduler whose decisions are another program's.

    `host` decides which requests run with how many tokens, and has the KV blocks, so that sequences count none. They
    are kept in the states that follow: a backend sees steps, counters and load as it does with `EngineCore`. Caches
    cannot be transferred.
    """

    def __init__(self, config: EngineConfig, host: HostedScheduler) -> None:
        super().__init__(config)
        self._host = host
        self._shares_growing = False

    def submit(self, request: Request, now: float, options: SubmitOptions = PLAIN) -> Sequence:
        if options.remote_prefill or options.hold_blocks:
            raise ValueError(f"request {request.id}: expected no transfer of its cache, which a host keeps")
        sequence = super().submit(request, now, options)
        self._host.add(request, sequence.max_tokens)
        return sequence

    def end_step(self, batch: Batch, stopped: Iterable[Sequence], now: float) -> list[Sequence]:
        stopped = list(stopped)
        self._host.end_step({sequence.request.id for sequence in stopped})
        finished = super().end_step(batch, stopped, now)
        self.check_integrity()
        return finished

    def abort(self, request_id: int, now: float) -> Sequence | None:
        if request_id in self.sequences:
            self._host.abort(request_id)
        return super().abort(request_id, now)

    def cached_prefix_tokens(self, request: Request) -> int:
        return self._host.cached_prefix_tokens(request)

    def steady_decode_steps(self) -> int:
        return 0  # the host decides every step

    def check_integrity(self) -> None:
        """Check that the host has as many unfinished requests, and note its free blocks."""
        self.kv_cache.num_free_blocks = self._host.num_free_blocks()
        unfinished = self._host.num_unfinished()
        if unfinished != len(self.sequences):
            raise AssertionError(f"the host has {unfinished} unfinished requests, {len(self.sequences)} are here")

    def _schedule_running(self, chunks: list[Chunk]) -> list[Sequence] | tuple[()]:
        """See `EngineCore._schedule_running`. The host schedules waiting sequences as well."""
        preempted, scheduled = self._host.schedule()
        for request_id in preempted:
            self.preempt(self.sequences[request_id])
        decodes: set[Sequence] = set()
        for request_id, num_tokens, num_computed_tokens in scheduled:
            sequence = self.sequences[request_id]
            if sequence.state == WAITING:
                self._queue_of(sequence).remove(sequence)
                start_prefill(self, sequence, num_computed_tokens)
                self.running[sequence] = None
            if sequence.state == PREFILLING:
                self.schedule_chunk(chunks, sequence, num_tokens)
            else:
                decodes.add(sequence)
        self.kv_cache.num_free_blocks = self._host.num_free_blocks()
        return self.pause([sequence for sequence in self.decode_set.sequences if sequence not in decodes])

    def _sync_blocks(self, sequence: Sequence) -> None:
        """See `CoreState._sync_blocks`. The host has the blocks."""
