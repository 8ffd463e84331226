"""One engine of a topology: it computes requests, and sends or receives the KV blocks of their prompts."""

from __future__ import annotations

import torch

from live.engine import Engine, StepResult
from live.models.decoder import Decoder
from live.topologies.pools.layout import (
    BLOCKS,
    EVENTS,
    EVENTS_AT_ONCE,
    FRONT,
    NORMAL,
    PREFILL,
    REPORT,
    RESERVED,
    WORK,
    PoolsLayout,
)
from live.topologies.pools.transfers import Arrivals, Departures, ReceivingExecutor, ReceivingGraphExecutor
from live.topologies.requests import PackedRequests, pack_tokens, unpack_requests
from live.topologies.transport import IDLE, STOP, Computing, Message, ReceiveAny, Role, Transport, TransportError
from schedulers.router_views import CacheEvents
from schedulers.step_policies import ChunkPolicy


class EngineWorker:
    """One engine of the layout; its role decides what the front sends it. `graphs`: as CUDA graphs, on a CPU padded."""

    def __init__(
        self,
        layout: PoolsLayout,
        rank: int,
        decoder: Decoder,
        transport: Transport,
        chunks: ChunkPolicy | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        place = layout.engines[rank - 1]
        make = ReceivingGraphExecutor if graphs else ReceivingExecutor
        self.engine = Engine(decoder, place.config, chunks, clock=transport.clock, make_executor=make)
        executor = self.engine.executor
        if isinstance(executor, ReceivingGraphExecutor):
            executor.capture_ahead()
        assert isinstance(executor, ReceivingExecutor)
        self._on_gpu = executor.device.type == "cuda"
        self._transport = transport
        self._senders = layout.senders(rank)
        self._receivers = layout.receivers(rank)
        self._departures = Departures(self.engine, executor, transport)
        if layout.with_chunks:
            executor.departures = self._departures
        self._arrivals = Arrivals(self.engine, executor)
        self._events = CacheEvents() if layout.kv_events else None
        if self._events is not None:
            self.engine.core.observe_cache(self._events)
        self._nothing_to_run = False  # until a message comes

    def run(self) -> Role:
        """Take what the front and prefill engines send; step while there are requests; end when all senders have ended.

        A prefill engine first waits for where complete prompts go: two messages, where they would else wait for a step.
        """
        sources, not_stopped = (FRONT, *self._senders), 1 + len(self._senders)
        while not_stopped:
            message = yield ReceiveAny(sources, wait=self._is_idle())
            if message is None:
                if self._on_gpu and self.engine.launch():
                    yield Computing.launched()
                result = self.engine.step()
                self._nothing_to_run = result is None
                if result is not None:
                    self._report(result)
                continue
            self._nothing_to_run = False
            if message.kind == STOP:
                not_stopped -= 1
            elif message.kind == WORK:
                self._take(message)
            elif message.kind == BLOCKS:
                self._arrivals.take(message)
            elif message.kind != IDLE:
                raise TransportError(f"a message of kind {message.kind} has come: expected work or blocks")
        for rank in (*self._receivers, FRONT):
            self._transport.send(rank, Message(STOP))

    def _is_idle(self) -> bool:
        core = self.engine.core
        waits = self._nothing_to_run or bool(self._departures.complete)
        return waits or len(core.sequences) == len(core.reserved)

    def _take(self, work: Message) -> None:
        *packed, aborts, sends = work.tensors
        for request_id in aborts.tolist():
            self._drop(request_id)
        for generation, source in unpack_requests(PackedRequests(*packed)):
            request_id = generation.request.id
            if source == NORMAL:
                self.engine.submit(generation)
            elif source == PREFILL:
                self._departures.hold(self.engine.submit(generation, max_tokens=1, hold_blocks=True))
            elif generation.output:
                self._arrivals.expect(generation)
            else:
                granted = self._arrivals.reserve(generation)
                self._transport.send(FRONT, Message(RESERVED, (self._transport.rank, request_id, int(granted))))
        for request_id, rank in sends.tolist():
            self._departures.send(request_id, rank)

    def _drop(self, request_id: int) -> None:
        self._arrivals.drop(request_id)
        self._departures.drop(request_id)

    def _report(self, result: StepResult) -> None:
        core = self.engine.core
        for generation in result.finished:
            if generation.finish_reason == "stop" or generation.request.max_tokens <= 1:
                self._drop(generation.request.id)
        self._departures.finish(generation.request.id for generation in result.finished)
        if self._events is not None:
            self._tell(self._events.take())
        blocks = core.kv_cache.num_free_blocks
        counts = core.num_running, blocks, core.preemptions, core.prefill_tokens, core.cached_tokens
        tokens = pack_tokens(result.progress.advanced)
        self._transport.send(FRONT, Message(REPORT, (self._transport.rank, *counts), tokens))
        self._departures.go_on()

    def _tell(self, events: list[tuple[bool, int]]) -> None:
        rows = torch.tensor(events, dtype=torch.int64).reshape(-1, 2)
        for part in rows.split(EVENTS_AT_ONCE) if events else ():
            self._transport.send(FRONT, Message(EVENTS, (self._transport.rank,), (part,)))
