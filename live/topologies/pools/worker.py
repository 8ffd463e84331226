"""One engine of a topology: it computes requests, and sends or receives the KV blocks of their prompts.

A cache travels as messages of some blocks, in order. It leaves when its prompt is complete, or while later chunks are
computed: then the decode engine has reserved its blocks, and they are written where they belong as they come. The last
message says that it is the last one, or that no more come because the prompt was given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from live.block_pool import BlockPool
from live.device import to_device
from live.engine import Engine, Progress
from live.executor import AsyncModelRunnerOutput, Executor
from live.generation import Generation
from live.graphs.executor import GraphExecutor
from live.models.decoder import Decoder
from live.topologies.pools.layout import (
    BEGUN,
    BLOCKS,
    BLOCKS_AT_ONCE,
    EVENTS,
    EVENTS_AT_ONCE,
    FRONT,
    GIVEN_UP,
    LAST,
    MORE,
    NORMAL,
    PREFILL,
    REPORT,
    RESERVED,
    SENT,
    WORK,
    PoolsLayout,
)
from live.topologies.transport import (
    IDLE,
    STOP,
    Computing,
    Message,
    ReceiveAny,
    Role,
    Transport,
    TransportError,
    pack_tokens,
    unpack_requests,
)
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.router_views import CacheEvents
from schedulers.sequence import PREFILLING, Sequence
from schedulers.step_policies import ChunkPolicy


class ReceivingExecutor(Executor):
    """An executor for caches that another engine computed: blocks are (blocks, 2, layers, block size, kv_heads,
    head_dim).

    `arrived`: of prompts that are not admitted yet. `departures`: told of steps beforehand; None: caches leave
    complete.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> None:
        super().__init__(decoder, pool, config)
        self.arrived: dict[int, torch.Tensor] = {}
        self.departures: Departures | None = None

    def launch(self, batch: Batch) -> AsyncModelRunnerOutput:
        """See `Executor.launch`. Blocks of sequences that are admitted in this step are written to the cache first."""
        for sequence in batch.transferred:
            blocks = self.arrived.pop(sequence.request.id, None)
            if blocks is not None:
                self.write(sequence, 0, blocks)
        if self.departures is not None:
            self.departures.begin(batch)
        return super().launch(batch)

    def blocks_of(self, sequence: Sequence, begin: int, end: int) -> torch.Tensor:
        """Some of a sequence's blocks, as they travel."""
        table = to_device(np.array(self.pool.table(sequence.blocks)[begin:end], dtype=np.int64), self.device)
        with torch.inference_mode():
            return torch.stack((self.cache.keys[:, table], self.cache.values[:, table])).permute(2, 0, 1, 3, 4, 5)

    def write(self, sequence: Sequence, begin: int, blocks: torch.Tensor) -> None:
        """Write blocks to those of a sequence, from its `begin`-th on."""
        ids = self.pool.table(sequence.blocks)[begin : begin + len(blocks)]
        if not ids:  # admitted and preempted at once: it computes its prompt again
            return
        table = to_device(np.array(ids), self.device)
        parts = blocks.permute(1, 2, 0, 3, 4, 5)
        with torch.inference_mode():
            self.cache.keys[:, table], self.cache.values[:, table] = parts[0], parts[1]


class ReceivingGraphExecutor(ReceivingExecutor, GraphExecutor):
    """A `ReceivingExecutor` that runs padded steps, on a GPU as graphs."""


@dataclass(slots=True)
class _Departure:
    """A prompt whose blocks are held: for which rank (None: not known), how many have left, and if the front knows."""

    sequence: Sequence
    rank: int | None = None
    sent: int = 0
    announced: bool = False


class Departures:
    """The caches that leave an engine; `complete`: ids of prompts of which the front has not yet said where they go."""

    def __init__(self, engine: Engine, executor: ReceivingExecutor, transport: Transport) -> None:
        self.complete: set[int] = set()
        self._core = engine.core
        self._executor = executor
        self._transport = transport
        self._held: dict[int, _Departure] = {}

    def hold(self, sequence: Sequence) -> None:
        """A prompt has been submitted, whose blocks are to be sent."""
        self._held[sequence.request.id] = _Departure(sequence)

    def begin(self, batch: Batch) -> None:
        """A step begins: tell the front of prompts that have more chunks than it, so that these need not wait."""
        for chunk in batch.chunks:
            departure = self._held.get(chunk.sequence.request.id)
            if departure is None or departure.announced or chunk.last or chunk.sequence.request.max_tokens <= 1:
                continue
            departure.announced = True
            self._transport.send(FRONT, Message(BEGUN, (self._transport.rank, chunk.sequence.request.id)))

    def send(self, request_id: int, rank: int) -> None:
        """The front has said where a prompt's blocks go: send those that there are."""
        departure = self._held.get(request_id)
        if departure is None:  # its answer has ended meanwhile
            self._give_up(request_id, rank)
            return
        departure.rank = rank
        self._send_computed(departure)

    def finish(self, request_ids: Iterable[int]) -> None:
        """Prompts are complete. The front is told right after, and says where those of them go that it has not yet."""
        for request_id in request_ids:
            if request_id in self._held and self._held[request_id].rank is None:
                self.complete.add(request_id)

    def go_on(self) -> None:
        """A step has ended: send what it has computed of prompts whose decode engine is known."""
        for departure in [departure for departure in self._held.values() if departure.rank is not None]:
            self._send_computed(departure)

    def drop(self, request_id: int) -> None:
        """Give up a prompt's blocks."""
        self.complete.discard(request_id)
        departure = self._held.pop(request_id, None)
        if departure is None:
            return
        self._core.release(departure.sequence)
        if departure.rank is not None:
            self._give_up(request_id, departure.rank)

    def _give_up(self, request_id: int, rank: int) -> None:
        executor = self._executor
        none = executor.cache.keys.new_empty((0, 2, *self._row()))
        self._transport.send(rank, Message(BLOCKS, (request_id, GIVEN_UP), (none,)))
        self._transport.send(FRONT, Message(SENT, (self._transport.rank, request_id, 0)))

    def _row(self) -> tuple[int, ...]:
        """(layers, block size, kv_heads, head_dim)."""
        keys = self._executor.cache.keys
        return (keys.shape[0], *keys.shape[2:])

    def _send_computed(self, departure: _Departure) -> None:
        """Send the blocks that are computed and have not been sent: the whole ones, and of a complete prompt all."""
        sequence, rank = departure.sequence, departure.rank
        assert rank is not None, "the front has said where they go"
        core, request_id = self._core, sequence.request.id
        complete = sequence in core.awaiting_transfer
        if complete:
            end = core.kv_cache.blocks_for(sequence.request.prompt_tokens)
        elif sequence.state == PREFILLING:
            end = sequence.num_computed_tokens // core.kv_cache.block_size
        else:  # preempted: it computes again what has been sent
            return
        while departure.sent < end:
            until = min(departure.sent + BLOCKS_AT_ONCE, end)
            blocks = self._executor.blocks_of(sequence, departure.sent, until)
            departure.sent = until
            state = LAST if complete and until == end else MORE
            self._transport.send(rank, Message(BLOCKS, (request_id, state), (blocks,)))
        if complete:
            del self._held[request_id]
            self.complete.discard(request_id)
            core.release(sequence)
            self._transport.send(FRONT, Message(SENT, (self._transport.rank, request_id, 1)))


@dataclass(slots=True)
class _Arrival:
    """A cache that is coming: `filled` blocks are in `sequence`; without one, they are kept in `parts`."""

    sequence: Sequence | None = None
    filled: int = 0
    parts: list[torch.Tensor] = field(default_factory=list)
    ended: bool = False
    generation: Generation | None = None
    dropped: bool = False


class Arrivals:
    """The caches that come to an engine. A request is submitted when its cache is complete."""

    def __init__(self, engine: Engine, executor: ReceivingExecutor) -> None:
        self._engine = engine
        self._executor = executor
        self._coming: dict[int, _Arrival] = {}

    def reserve(self, generation: Generation) -> bool:
        """Reserve the blocks of a prompt that is being computed; False if there are too few: see `EngineCore`."""
        if generation.request.id in self._coming:  # its prefill engine was faster than the front's question
            return False
        sequence = self._engine.reserve(generation)
        if sequence is not None:
            self._coming[generation.request.id] = _Arrival(sequence)
        return sequence is not None

    def expect(self, generation: Generation) -> None:
        """A request with its first token: its cache has left its prefill engine."""
        arrival = self._coming.setdefault(generation.request.id, _Arrival())
        arrival.generation = generation
        self._submit_complete(arrival)

    def take(self, message: Message) -> None:
        """Take blocks that a prefill engine has sent."""
        (request_id, state), (blocks,) = message.fields, message.tensors
        arrival = self._coming.setdefault(request_id, _Arrival())
        if state == GIVEN_UP:
            del self._coming[request_id]
            self._engine.abort(request_id)
            return
        if arrival.sequence is not None:
            self._executor.write(arrival.sequence, arrival.filled, blocks)
            arrival.filled += len(blocks)
        else:
            arrival.parts.append(blocks.clone())
        arrival.ended = state == LAST
        self._submit_complete(arrival)

    def drop(self, request_id: int) -> None:
        """A request is aborted. If its cache is still coming, it ends when that is complete."""
        self._executor.arrived.pop(request_id, None)
        arrival = self._coming.get(request_id)
        if arrival is not None and arrival.generation is not None:
            arrival.dropped = True
            return
        self._coming.pop(request_id, None)  # its prefill engine was not told to send it
        self._engine.abort(request_id)

    def _submit_complete(self, arrival: _Arrival) -> None:
        generation = arrival.generation
        if generation is None or not arrival.ended:
            return
        request_id = generation.request.id
        del self._coming[request_id]
        if arrival.dropped:
            self._engine.abort(request_id)
            return
        if arrival.sequence is None:
            self._executor.arrived[request_id] = torch.cat(arrival.parts)
        self._engine.submit(generation, remote_prefill=True)


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
        for generation, source in unpack_requests(*packed):
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

    def _report(self, result: Progress) -> None:
        core = self.engine.core
        for generation in result.finished:
            if generation.finish_reason == "stop" or generation.request.max_tokens <= 1:
                self._drop(generation.request.id)
        self._departures.finish(generation.request.id for generation in result.finished)
        if self._events is not None:
            self._tell(self._events.take())
        blocks = core.kv_cache.num_free_blocks
        counts = core.num_running, blocks, core.preemptions, core.prefill_tokens, core.cached_tokens
        tokens = pack_tokens(result.advanced)
        self._transport.send(FRONT, Message(REPORT, (self._transport.rank, *counts), tokens))
        self._departures.go_on()

    def _tell(self, events: list[tuple[bool, int]]) -> None:
        rows = torch.tensor(events, dtype=torch.int64).reshape(-1, 2)
        for part in rows.split(EVENTS_AT_ONCE) if events else ():
            self._transport.send(FRONT, Message(EVENTS, (self._transport.rank,), (part,)))
