"""Instances of a bundle. Attention: requests, KV cache, attention, norms, gate and sampling; FFN: its weights alone.

Each microbatch is an engine of its own, with B sequences and a part of the KV cache: prompts run in chunks beside
decodes, prefixes are shared and sequences preempted as in any engine. Its forward pass stops behind the attention stage
of each layer, while the FFN instances compute; meanwhile it is the next microbatch's turn (AFD figure 2a).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from functools import partial

import torch

from live.engine import Engine, StepResult
from live.executor import ModelRunnerOutput
from live.generation import Generation
from live.models.config import ModelConfig
from live.models.decoder import Decoder, FFNRows
from live.models.weights import FFN
from live.topologies.bundle.layout import COMMAND, COORDINATOR, OUTPUT, RESULT, ROWS, BundleLayout
from live.topologies.bundle.stages import AttentionStages, FFNStages, GraphedAttentionStages, GraphedFFNStages
from live.topologies.requests import PackedRequests, pack_tokens, unpack_requests
from live.topologies.transport import IDLE, STOP, Message, Receive, Role, Transport, TransportError, Wait, received
from schedulers.batches import Batch

Turn = Generator[Wait | None, Message | None, None]
"""A microbatch's life: what it waits for, or None when it is the next microbatch's turn."""


class AttentionWorker:
    """One attention instance; `engines` are its microbatches. `graphs`: steps without prompts run as CUDA graphs."""

    def __init__(self, layout: BundleLayout, decoder: Decoder, transport: Transport, *, graphs: bool = False) -> None:
        self._layout = layout
        self._decoder = decoder
        self._transport = transport
        self._instance = transport.rank - layout.attention_ranks.start
        self.engines = [Engine(decoder, layout.engine, clock=transport.clock) for _ in range(layout.microbatches)]
        make = GraphedAttentionStages if graphs else AttentionStages
        self._stages: list[AttentionStages] = [make(decoder, engine) for engine in self.engines]
        for stages in self._stages:
            stages.capture_ahead()
        norm = decoder.weights.norm
        self._no_rows = zero_rows(decoder.config, norm.dtype, norm.device, 0)
        self._home: dict[int, Engine] = {}  # of each unfinished request
        self._turns: deque[tuple[int, Turn]] = deque()

    def run(self) -> Role:
        """Microbatches in turns, until the coordinator says STOP. When none runs, the coordinator's next command."""
        while True:
            message = received((yield Receive(COORDINATOR)))
            if message.kind != COMMAND:
                for rank in self._layout.ffn_ranks:
                    self._transport.send(rank, message)
                if message.kind == STOP:
                    return
                continue
            self._obey(message, current=None)
            while self._turns:
                yield from self._turn()

    def _turn(self) -> Role:
        """Let the next microbatch go on until it waits for the FFN, or has ended."""
        index, life = self._turns.popleft()
        message: Message | None = None
        while True:
            try:
                wait = life.send(message)
            except StopIteration:
                return
            if wait is None:
                self._turns.append((index, life))
                return
            message = yield wait

    def _obey(self, command: Message, current: int | None) -> bool:
        """Admit and abort requests; returns whether to go on. One with a first token has its prompt's KV in place."""
        *packed, aborts = command.tensors
        for request_id in aborts.tolist():
            engine = self._home.pop(request_id, None)
            if engine is not None:
                engine.abort(request_id)
        for generation, index in unpack_requests(PackedRequests(*packed)):
            self._home[generation.request.id] = self.engines[index]
            self.engines[index].submit(generation, remote_prefill=bool(generation.output))
        started = [index for index in range(self._layout.microbatches) if command.fields[0] >> index & 1]
        self._turns.extend((index, self._life(index)) for index in started if index != current)
        return current in started

    def _life(self, index: int) -> Turn:
        while True:
            yield from self._step(index)
            command = received((yield Receive(COORDINATOR)))
            if command.kind != COMMAND:
                raise TransportError(
                    f"the coordinator sent {command.kind} to a microbatch that runs: expected {COMMAND}"
                )
            if not self._obey(command, current=index):
                return

    def _step(self, index: int) -> Turn:
        engine, stages = self.engines[index], self._stages[index]
        batch = engine.schedule(self._transport.clock())
        if batch is not None:
            stages.begin(batch)
        hidden: torch.Tensor | None = None
        for layer in range(self._decoder.config.shape.layers):
            rows = self._no_rows if batch is None else stages.layer(layer, hidden)
            shares = self._send(index, layer, rows)
            yield None
            hidden = yield from self._receive(index, layer, shares)
        advanced: list[Generation] = []
        if batch is not None and hidden is not None:
            advanced = self._commit(engine, batch, stages.output(batch, hidden))
        core = engine.core
        fields = (index, core.kv_cache.num_free_blocks, core.preemptions)
        self._transport.send(COORDINATOR, Message(RESULT, fields, pack_tokens(advanced)))

    def _send(self, index: int, layer: int, rows: FFNRows) -> list[int]:
        """Send each FFN instance its share of the rows; returns the shares."""
        shares = self._layout.shares(rows.hidden.shape[0], self._instance, index)
        tensors = [tensor for tensor in rows if tensor is not None]
        parts = [tensor.split(shares) if len(shares) > 1 else (tensor,) for tensor in tensors]
        for rank, *share in zip(self._layout.ffn_ranks, *parts, strict=True):
            self._transport.send(rank, Message(ROWS, (index, layer), tuple(share)))
        return shares

    def _receive(self, index: int, layer: int, shares: list[int]) -> Generator[Wait, Message | None, torch.Tensor]:
        parts = []
        for rank, share in zip(self._layout.ffn_ranks, shares, strict=True):
            message = received((yield Receive(rank)))
            content = (message.kind, message.fields, *(tensor.shape[0] for tensor in message.tensors))
            if content != (OUTPUT, (index, layer), share):
                raise TransportError(
                    f"{self._layout.names[rank]} sent {content}: expected {share} rows of microbatch {index}, "
                    f"layer {layer}"
                )
            parts.append(message.tensors[0])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _commit(self, engine: Engine, batch: Batch, output: ModelRunnerOutput) -> list[Generation]:
        finished = engine.commit(batch, batch.decodes, output, self._transport.clock())
        for generation in finished:
            del self._home[generation.request.id]
        return StepResult(output, finished).progress.advanced


class FFNWorker:
    """Computes the FFN stage for all attention instances together.

    `captured`: rows such as those that come (`zero_rows`), for which padded stages become CUDA graphs; None: no graphs.
    """

    def __init__(
        self, layout: BundleLayout, ffns: Sequence[FFN], transport: Transport, *, captured: FFNRows | None = None
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._stages = FFNStages(ffns)
        if captured is not None:
            self._stages = graphed = GraphedFFNStages(ffns)
            share = -(-layout.engine.max_num_seqs // layout.ffn_instances)
            graphed.capture_ahead(captured, layout.attention_instances * share)

    def run(self) -> Role:
        """One microbatch after the other, in the instances' order: waiting for all is the barrier of AFD 3.1."""
        while True:
            messages: list[Message] = []
            for source in self._layout.attention_ranks:
                messages.append(received((yield Receive(source))))
            kind = _common(messages)
            if kind == STOP:
                return
            if kind != IDLE:
                self._compute(messages)

    def _compute(self, messages: Sequence[Message]) -> None:
        fields = messages[0].fields
        counts = [message.tensors[0].shape[0] for message in messages]
        present = [message.tensors for message, count in zip(messages, counts, strict=True) if count]
        if present:
            columns = [torch.cat(column) if len(column) > 1 else column[0] for column in zip(*present, strict=True)]
            output = self._stages.layer(fields[1], FFNRows(*columns))
        else:
            output = messages[0].tensors[0]
        parts = output.split(counts) if len(counts) > 1 else (output,)
        for rank, part in zip(self._layout.attention_ranks, parts, strict=True):
            self._transport.send(rank, Message(OUTPUT, fields, (part,)))


def zero_rows(config: ModelConfig, dtype: torch.dtype, device: torch.device, count: int) -> FFNRows:
    """So many rows of zeros as an FFN's input."""
    zeros, top_k = partial(torch.zeros, device=device), config.shape.experts_per_token
    hidden = zeros((count, config.shape.hidden), dtype=dtype)
    if not top_k:
        return FFNRows(hidden)
    return FFNRows(hidden, zeros((count, top_k), dtype=torch.float32), zeros((count, top_k), dtype=torch.int32))


def _common(messages: Sequence[Message]) -> int:
    first = messages[0]
    for i, message in enumerate(messages):
        if (message.kind, message.fields) != (first.kind, first.fields) or message.kind not in (STOP, IDLE, ROWS):
            raise TransportError(
                f"attention {i} sent {message.kind, message.fields}, attention 0 {first.kind, first.fields}: expected "
                "the same microbatch and layer of all"
            )
    return first.kind
