"""Instances of a bundle. Attention: requests, KV cache, attention, norms, gate and sampling; FFN: its weights alone.

Each microbatch is an engine of its own, with B sequences and a part of the KV cache: prompts run in chunks beside
decodes, prefixes are shared and sequences preempted as in any engine. Its forward pass stops behind the attention stage
of each layer, while the FFN instances compute; meanwhile it is the next microbatch's turn (AFD figure 2a).

The stages run kernel by kernel, or as CUDA graphs of padded sizes. A decode step has the same kernels at each layer,
and they are short: launching them takes the host longer than the GPU needs to run them. So each layer's stage becomes a
graph for each padded number of rows. Steps with prompt chunks vary too much and run kernel by kernel. On a CPU the
padded stages run kernel by kernel, with the same results.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch

from live.engine import Engine, Progress
from live.executor import ModelRunnerOutput
from live.generation import Generation
from live.graphs.capture_sizes import WIDTHS, StepShape, at_least, powers, sizes
from live.graphs.executor import PaddedInputs, on_device
from live.graphs.step import CapturedCall, GraphMemory
from live.models.config import ModelConfig
from live.models.decoder import Decoder, FFNRows, Inputs, PagedCache, ffn_stage, with_decode_work
from live.models.weights import FFN
from live.topologies.bundle.coordinator import COMMAND, COORDINATOR, OUTPUT, RESULT, ROWS, BundleLayout
from live.topologies.transport import (
    IDLE,
    STOP,
    Message,
    Receive,
    Role,
    Transport,
    TransportError,
    Wait,
    pack_tokens,
    received,
    unpack_requests,
)
from schedulers.batches import Batch


class AttentionStages:
    """The attention stages of one microbatch of an attention instance, kernel by kernel; called in the order below."""

    def __init__(self, decoder: Decoder, engine: Engine) -> None:
        self._decoder = decoder
        self._executor = engine.executor
        self._inputs: Inputs | None = None
        self._residual: torch.Tensor | None = None

    def capture_ahead(self) -> None:
        """Do before the first step what would delay it. These stages have nothing to do."""

    def begin(self, batch: Batch) -> None:
        """Take the inputs of a step."""
        self._begin(self._executor.step_inputs(batch))

    def _begin(self, inputs: Inputs) -> None:
        self._inputs = with_decode_work(on_device(inputs, self._executor.device), self._executor.cache)
        self._residual = None

    def layer(self, index: int, hidden: torch.Tensor | None) -> FFNRows:
        """Rows for a layer's FFN, valid until the next call, from the output before, (n, hidden); None at first."""
        inputs = self._inputs
        assert inputs is not None, "a step has begun"
        hidden = self._decoder.embed(inputs) if hidden is None else hidden
        cache = self._executor.cache
        rows, self._residual = self._decoder.attention_stage(index, hidden, self._residual, inputs, cache)
        return rows

    def output(self, batch: Batch, hidden: torch.Tensor) -> ModelRunnerOutput:
        """The step's output, from the last FFN's, (n, hidden)."""
        assert self._residual is not None, "every layer has run"
        return self._executor.output(batch, hidden + self._residual)


class GraphedAttentionStages(AttentionStages):
    """`AttentionStages` whose steps without prompts are padded, and on a GPU become graphs, one for each layer."""

    def __init__(self, decoder: Decoder, engine: Engine) -> None:
        super().__init__(decoder, engine)
        rows, blocks = engine.executor.input_batch.tables.shape
        self._sizes = sizes(rows, 2)
        self._widths = powers(*WIDTHS, blocks)
        self._memory = GraphMemory.on(engine.executor.device)
        engine.executor.inputs_on_host = True
        self._steps: dict[tuple[int, int], _PaddedStep] = {}
        self._padded: _PaddedStep | None = None
        self._rows = 0

    def begin(self, batch: Batch) -> None:
        inputs = self._executor.step_inputs(batch)
        self._padded = None
        if batch.chunks:
            self._begin(inputs)
        else:
            self._rows, width = inputs.decode_tables.shape
            self._padded = self._step(at_least(self._sizes, self._rows), at_least(self._widths, width))
            self._padded.fill(inputs)

    @torch.inference_mode()
    def capture_ahead(self) -> None:
        """Compile and capture the stages of the narrowest block tables, whose rows so far are padding."""
        for rows in reversed(self._sizes):
            for stage in self._step(rows, self._widths[0]).stages:
                stage.capture()

    def _step(self, rows: int, width: int) -> _PaddedStep:
        step = self._steps.get((rows, width))
        if step is None:
            step = self._steps[rows, width] = _PaddedStep(self._decoder, self._executor.cache, rows, width)
            step.stages = [CapturedCall(partial(step.run, i), self._memory) for i in range(step.layers)]
        return step

    def layer(self, index: int, hidden: torch.Tensor | None) -> FFNRows:
        step = self._padded
        if step is None:
            return super().layer(index, hidden)
        if hidden is not None:
            step.hidden[: self._rows].copy_(hidden)
        return _map_rows(step.stages[index](), lambda tensor: tensor[: self._rows])

    def output(self, batch: Batch, hidden: torch.Tensor) -> ModelRunnerOutput:
        if self._padded is not None:
            self._residual = self._padded.residual[: self._rows]
        return super().output(batch, hidden)


class _PaddedStep(PaddedInputs):
    """A padded step without prompts; `hidden`, `residual`: (rows, hidden), which keep their addresses, too."""

    def __init__(self, decoder: Decoder, cache: PagedCache, rows: int, width: int) -> None:
        embedding = decoder.weights.embedding
        super().__init__(StepShape(rows, 0, 0, width, greedy_only=False), embedding.device)
        self._decoder = decoder
        self._cache = cache
        self.layers = decoder.config.shape.layers
        self.hidden = embedding.new_zeros((rows, embedding.shape[1]))
        self.residual = torch.zeros_like(self.hidden)
        self.stages: list[CapturedCall[FFNRows]] = []

    def run(self, index: int) -> FFNRows:
        """One layer's stage, from `hidden` and `residual`; writes `residual`."""
        first = index == 0
        if first:
            self.inputs = with_decode_work(self.inputs, self._cache)
        hidden = self._decoder.embed(self.inputs) if first else self.hidden
        residual = None if first else self.residual
        rows, residual = self._decoder.attention_stage(index, hidden, residual, self.inputs, self._cache)
        self.residual.copy_(residual)
        return rows


PADDED_ROWS = 2048
"""Rows up to which FFN stages become graphs."""


class FFNStages:
    """The FFN stages of one FFN instance, kernel by kernel; of up to `max_rows` rows padded, and on a GPU as graphs."""

    def __init__(self, ffns: Sequence[FFN], max_rows: int = 0) -> None:
        self._ffns = ffns
        self._sizes = sizes(max_rows, 2) if max_rows else []
        self._memory: GraphMemory | None = None
        self._inputs: dict[int, FFNRows] = {}
        self._calls: dict[tuple[int, int], CapturedCall[torch.Tensor]] = {}

    def layer(self, index: int, rows: FFNRows) -> torch.Tensor:
        """One layer's FFN stage, (n, hidden), in memory of its own."""
        n = rows.hidden.shape[0]
        if not self._sizes or n > self._sizes[-1]:
            return ffn_stage(self._ffns[index], rows)
        padded, call = self._call(index, at_least(self._sizes, n), rows)
        for tensor, values in zip(padded, rows, strict=True):
            if tensor is not None and values is not None:
                tensor[:n].copy_(values)
                tensor[n:] = values[:1]  # padding that asks for no other expert
        return call()[:n].clone()  # the next microbatch may run before this one's output has been sent

    @torch.inference_mode()
    def capture_ahead(self, rows: FFNRows, max_rows: int) -> None:
        """Compile and capture the stages of up to `max_rows` rows. `rows`: any that have their types and widths."""
        for size in reversed(self._sizes[: bisect_left(self._sizes, max_rows) + 1]):
            for index in range(len(self._ffns)):
                self._call(index, size, rows)[1].capture()

    def _call(self, index: int, size: int, rows: FFNRows) -> tuple[FFNRows, CapturedCall[torch.Tensor]]:
        """The padded rows of a size, and a layer's stage of them."""
        padded = self._inputs.get(size)
        if padded is None:
            self._memory = self._memory or GraphMemory.on(rows.hidden.device)
            padded = self._inputs[size] = _map_rows(rows, lambda tensor: tensor.new_zeros((size, *tensor.shape[1:])))
        call = self._calls.get((index, size))
        if call is None:
            function = partial(ffn_stage, self._ffns[index], padded)
            call = self._calls[index, size] = CapturedCall(function, self._memory)
        return padded, call


def _map_rows(rows: FFNRows, function: Callable[[torch.Tensor], torch.Tensor]) -> FFNRows:
    hidden, *routed = (tensor if tensor is None else function(tensor) for tensor in rows)
    assert hidden is not None, "there are hidden states"
    return FFNRows(hidden, *routed)


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
        for generation, index in unpack_requests(*packed):
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
        return Progress.of(output, finished).advanced


class FFNWorker:
    """Computes the FFN stage for all attention instances together.

    `captured`: rows such as those that come (`zero_rows`), for which padded stages become CUDA graphs; None: no graphs.
    """

    def __init__(
        self, layout: BundleLayout, ffns: Sequence[FFN], transport: Transport, *, captured: FFNRows | None = None
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._stages = FFNStages(ffns, 0 if captured is None else PADDED_ROWS)
        if captured is not None:
            share = -(-layout.engine.max_num_seqs // layout.ffn_instances)
            self._stages.capture_ahead(captured, layout.attention_instances * share)

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
