"""A step of a fixed shape, whose inputs stay at the same addresses, so that a GPU replays it as one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch

from kernels.sampling import sample
from live.graphs.buffers import Arrays, DeviceBuffers, fields, size, views
from live.graphs.capture_sizes import StepShape
from live.models.decoder import Decoder, Inputs, PagedCache

RUNS_BEFORE_CAPTURE = 2
"""Runs kernel by kernel before the capture: the first compiles the kernels, which a graph cannot hold."""

T = TypeVar("T")


class GraphMemory:
    """The memory of graphs that never run at the same time, and the stream that they are captured on.

    cuBLAS keeps a workspace for each stream, and a graph keeps that of the stream of its capture. Graphs that are
    replayed at the same time, by roles on streams of their own, must therefore not be captured on one stream: products
    that split their inputs would write to the same workspace.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    @classmethod
    def on(cls, device: torch.device) -> GraphMemory | None:
        """Memory for graphs on a device; None on a CPU, which has no graphs."""
        return None if device.type == "cpu" else cls()

    def capture(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture the kernels that a function launches. Returns the graph, and the result that its replays overwrite.

        `function`: has run before, since a graph cannot hold a kernel's compilation.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return graph, result


class CapturedCall(Generic[T]):
    """Calls a function, and after a few runs replays it as a graph.

    Args:
        function: reads and writes tensors whose addresses do not change, and waits for nothing.
        memory: of the graph; None: none, unless `capture_in` makes one.

    Attributes:
        runs: number of runs so far.
    """

    def __init__(self, function: Callable[[], T], memory: GraphMemory | None) -> None:
        self._function = function
        self._memory = memory
        self.runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: T | None = None

    def __call__(self) -> T:
        """The function's result. The next run of a graph overwrites its tensors."""
        if self._graph is None and self._memory is not None and self.runs >= RUNS_BEFORE_CAPTURE:
            self.capture_in(self._memory)
        self.runs += 1
        if self._graph is None:
            return self._function()
        assert self._result is not None
        self._graph.replay()
        return self._result

    @property
    def captured(self) -> bool:
        """True if the function is a graph."""
        return self._graph is not None

    def capture_in(self, memory: GraphMemory) -> None:
        """Capture the function, which must have run before: a graph cannot hold a kernel's compilation."""
        self._graph, self._result = memory.capture(self._function)

    def capture(self) -> None:
        """Run the function until it is a graph; nothing where there are no graphs."""
        while self._memory is not None and not self.captured:
            self()


@dataclass(frozen=True)
class UnsampledOutput:
    """The output of a step that does not sample its tokens itself.

    Attributes:
        hidden: (rows, hidden), before the final norm. normed: (logits indices, hidden).
        logits: (logits indices, vocabulary); None if the model has no LM head.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    logits: torch.Tensor | None


Result: TypeAlias = torch.Tensor | UnsampledOutput
"""A step's output on the device: the tokens, (logits indices,) int64, of a `greedy_only` step; else
`UnsampledOutput`.
"""


class StaticStep(CapturedCall[Result]):
    """A step of one shape, for one engine; a graph when it has been captured.

    Inputs are staged in two host buffers in turn. So the tokens of one run may be waited for after the next run has
    begun, but must be waited for before the run after that is staged.
    """

    def __init__(self, shape: StepShape, decoder: Decoder, cache: PagedCache, buffers: DeviceBuffers) -> None:
        super().__init__(self._launch, None)
        self.shape = shape
        self._decoder = decoder
        self._cache = cache
        self._buffers = buffers
        device = buffers.sampled.device
        on_gpu = device.type == "cuda"
        layout = fields(shape)
        staged = [torch.zeros(size(layout), dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._staged = [(memory, {k: v.numpy() for k, v in views(layout, memory).items()}) for memory in staged]
        self._buffer = torch.zeros(size(layout), dtype=torch.uint8, device=device)
        self.inputs = views(layout, self._buffer)
        rows = shape.decodes + shape.chunks
        self._greedy = buffers.greedy_metadata(rows) if shape.greedy_only else None

    def stage(self) -> Arrays:
        """The input arrays of the next run, filled with padding rows, to be overwritten."""
        self._staged.reverse()
        memory, arrays = self._staged[0]
        memory.zero_()
        arrays["table_rows"].fill(self._buffers.rows)
        arrays["slots"].fill(-1)
        return arrays

    def run(self) -> Result:
        """Send the staged inputs and launch the step. The next run of a graph overwrites its result."""
        self._buffer.copy_(self._staged[0][0], non_blocking=True)
        return self()

    def run_empty(self) -> None:
        """Run with padding rows only, which compiles the kernels or warms up the graph."""
        self.stage()
        self.run()

    def _launch(self) -> Result:
        hidden = self._decoder.forward(self._forward_inputs(), self._cache)
        rows = hidden[self.inputs["logits_indices"]] if self.shape.chunks else hidden
        normed = self._decoder.normed(rows)
        has_head = self._decoder.weights.head is not None
        logits = self._decoder.logits(normed) if has_head else None
        if self._greedy is None:
            return UnsampledOutput(hidden, normed, logits)
        assert logits is not None, "a model without LM head produces no tokens"
        tokens, _ = sample(logits, self._greedy)
        self._buffers.keep(tokens, self.shape.decodes)
        return tokens

    def _forward_inputs(self) -> Inputs:
        x, d = self.inputs, self.shape.decodes
        tables = x["chunk_tables"][:0]
        if d:
            tables = self._decode_tables()
            x["tokens"][:d].add_(self._buffers.sampled.index_select(0, x["token_sources"]))
        return Inputs(
            tokens=x["tokens"],
            positions=x["positions"],
            slots=x["slots"],
            decode_tables=tables,
            decode_lengths=x["lengths"],
            chunk_tables=x["chunk_tables"],
            chunk_starts=x["chunk_starts"],
            chunk_contexts=x["chunk_contexts"],
            no_context=self.shape.no_context,
        )

    def _decode_tables(self) -> torch.Tensor:
        """(decodes, blocks). The block that holds a token, which may be new, is entered into the tables here."""
        x, tables = self.inputs, self._buffers.tables
        tables.index_put_((x["table_rows"], x["table_columns"]), x["table_blocks"])
        return tables[:, : self.shape.blocks].index_select(0, x["table_rows"])
