"""One engine of a topology: it computes requests, and sends or receives the KV blocks of their prompts."""

from __future__ import annotations

from collections.abc import Generator

import torch

from live.block_pool import BlockPool
from live.engine import Engine, StepResult
from live.executor import AsyncModelRunnerOutput, Executor
from live.generation import Generation
from live.graphs.executor import GraphExecutor
from live.models.decoder import Decoder
from live.topologies.pools.layout import (
    BLOCKS,
    BLOCKS_AT_ONCE,
    EVENTS,
    EVENTS_AT_ONCE,
    FRONT,
    NORMAL,
    PREFILL,
    REPORT,
    SENT,
    WORK,
    EnginePlace,
)
from live.topologies.requests import PackedRequests, pack_tokens, unpack_requests
from live.topologies.transport import (
    IDLE,
    STOP,
    Message,
    Receive,
    ReceiveAny,
    Role,
    Transport,
    TransportError,
    Wait,
    received,
)
from schedulers.batches import Batch
from schedulers.chunking import ChunkPolicy
from schedulers.engine_config import EngineConfig
from schedulers.kv_events import CacheEvents
from schedulers.sequence import Sequence


class ReceivingExecutor(Executor):
    """An executor whose sequences may come with a KV cache that another engine has computed.

    Attributes:
        arrived: by request id, the blocks of prompts that have not been admitted yet, (blocks, 2, layers, block size,
            kv_heads, head_dim).
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> None:
        super().__init__(decoder, pool, config)
        self.arrived: dict[int, torch.Tensor] = {}

    def launch(self, batch: Batch) -> AsyncModelRunnerOutput:
        """See `Executor.launch`. Blocks of sequences that are admitted in this step are written to the cache first."""
        for sequence in batch.transferred:
            blocks = self.arrived.pop(sequence.request.id)
            ids = self.pool.table(sequence.blocks)[: len(blocks)]
            if not ids:  # admitted and preempted at once: it computes its prompt again
                continue
            table = torch.tensor(ids)
            parts = blocks.permute(1, 2, 0, 3, 4, 5)
            with torch.inference_mode():
                self.cache.keys[:, table], self.cache.values[:, table] = parts[0], parts[1]
        return super().launch(batch)

    def blocks_of(self, sequence: Sequence, count: int) -> torch.Tensor:
        """The first `count` blocks of a sequence, as in `arrived`."""
        table = torch.tensor(self.pool.table(sequence.blocks)[:count])
        with torch.inference_mode():
            return torch.stack((self.cache.keys[:, table], self.cache.values[:, table])).permute(2, 0, 1, 3, 4, 5)


class ReceivingGraphExecutor(ReceivingExecutor, GraphExecutor):
    """A `ReceivingExecutor` that runs padded steps, on a GPU as graphs."""


class EngineWorker:
    """One engine.

    Args:
        graphs: steps run as CUDA graphs, and on a CPU padded as these are.
        kv_events: tell the front what is in the prefix cache.

    Attributes:
        engine: the engine. Its role decides what the front sends it.
    """

    def __init__(
        self,
        place: EnginePlace,
        decoder: Decoder,
        transport: Transport,
        chunks: ChunkPolicy | None = None,
        *,
        graphs: bool = False,
        kv_events: bool = False,
    ) -> None:
        make = ReceivingGraphExecutor if graphs else ReceivingExecutor
        self.engine = Engine(decoder, place.config, chunks, clock=transport.clock, make_executor=make)
        executor = self.engine.executor
        if isinstance(executor, ReceivingGraphExecutor):
            executor.warm_up(executor.capture_sizes.decode_shapes())
        assert isinstance(executor, ReceivingExecutor)
        self._executor, self._transport = executor, transport
        self._held: dict[int, Sequence] = {}  # prompts whose blocks are to be sent
        self._events = CacheEvents() if kv_events else None
        if self._events is not None:
            self.engine.core.observe_cache(self._events)
        self._complete: set[int] = set()  # those of them that the front has been told of

    def run(self) -> Role:
        """Take what the front sends; step while there are requests.

        Before its next step, a prefill engine waits until the front has said where complete prompts go: that takes two
        messages, and otherwise they would wait for a whole step.
        """
        while True:
            idle = not self.engine.core.sequences or bool(self._complete)
            message = yield ReceiveAny((FRONT,), wait=idle)
            if message is None:
                result = self.engine.step()
                if result is not None:
                    self._report(result)
            elif message.kind == STOP:
                self._transport.send(FRONT, message)
                return
            elif message.kind == WORK:
                yield from self._take(message)
            elif message.kind != IDLE:
                raise TransportError(f"the front sent a message of kind {message.kind}: expected work")

    def _take(self, work: Message) -> Role:
        """Abort and submit requests, and send blocks."""
        *packed, aborts, sends = work.tensors
        for request_id in aborts.tolist():
            self._drop(request_id)
        for generation, source in unpack_requests(PackedRequests(*packed)):
            if source == NORMAL:
                self.engine.submit(generation)
            elif source == PREFILL:
                sequence = self.engine.submit(generation, max_tokens=1, hold_blocks=True)
                self._held[generation.request.id] = sequence
            else:
                self._executor.arrived[generation.request.id] = yield from self._receive(generation, source)
                self.engine.submit(generation, remote_prefill=True)
        for request_id, rank in sends.tolist():
            self._send(request_id, rank)

    def _drop(self, request_id: int) -> None:
        """Abort a request, or give up the blocks of its prompt."""
        self.engine.abort(request_id)
        self._executor.arrived.pop(request_id, None)
        self._complete.discard(request_id)
        held = self._held.pop(request_id, None)
        if held is not None:
            self.engine.core.release(held)

    def _send(self, request_id: int, rank: int) -> None:
        """Send the blocks of a prompt to a decode engine and give them up."""
        sequence = self._held.pop(request_id)
        self._complete.discard(request_id)
        core = self.engine.core
        blocks = self._executor.blocks_of(sequence, core.kv_cache.blocks_for(sequence.request.prompt_tokens))
        parts = blocks.split(BLOCKS_AT_ONCE)
        for i, part in enumerate(parts):
            self._transport.send(rank, Message(BLOCKS, (request_id, len(parts) - 1 - i), (part,)))
        core.release(sequence)
        self._transport.send(FRONT, Message(SENT, (self._transport.rank, request_id)))

    def _receive(self, generation: Generation, source: int) -> Generator[Wait, Message | None, torch.Tensor]:
        """The blocks of a prompt, from a prefill engine that has sent them."""
        parts: list[torch.Tensor] = []
        following = 1
        while following:
            message = received((yield Receive(source)))
            if message.kind != BLOCKS or message.fields[0] != generation.request.id:
                raise TransportError(
                    f"rank {source} sent {message.kind, message.fields}: expected blocks of request "
                    f"{generation.request.id}"
                )
            following = message.fields[1]
            parts.append(message.tensors[0].clone())
        return torch.cat(parts)

    def _report(self, result: StepResult) -> None:
        """Tell the front what a step has changed. Prompts that need no decode engine give up their blocks."""
        core = self.engine.core
        advanced = result.progress.advanced
        for generation in result.finished:
            if generation.finish_reason == "stop" or generation.request.max_tokens <= 1:
                self._drop(generation.request.id)
            elif generation.request.id in self._held:
                self._complete.add(generation.request.id)
        if self._events is not None:
            self._tell(self._events.take())
        counts = core.kv_cache.num_free_blocks, core.preemptions, core.prefill_tokens, core.cached_tokens
        self._transport.send(FRONT, Message(REPORT, (self._transport.rank, *counts), (pack_tokens(advanced),)))

    def _tell(self, events: list[tuple[bool, int]]) -> None:
        """Tell the front of changes of the prefix cache."""
        rows = torch.tensor(events, dtype=torch.int64).reshape(-1, 2)
        for part in rows.split(EVENTS_AT_ONCE) if events else ():
            self._transport.send(FRONT, Message(EVENTS, (self._transport.rank,), (part,)))
