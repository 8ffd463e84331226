"""A function of tensors at fixed addresses that becomes a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

RUNS_BEFORE_CAPTURE = 2
"""Runs kernel by kernel before the capture: the first compiles the kernels, which a graph cannot hold."""

Result = TypeVar("Result")


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

    def capture(self, function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Capture the kernels that a function launches. Returns the graph, and the result that its replays overwrite.

        `function`: has run before, since a graph cannot hold a kernel's compilation.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return graph, result


class CapturedCall(Generic[Result]):
    """Calls a function, and after a few runs replays it as a graph.

    Args:
        function: reads and writes tensors whose addresses do not change, and waits for nothing.
        memory: of the graph; None: no graphs.
    """

    def __init__(self, function: Callable[[], Result], memory: GraphMemory | None) -> None:
        self._function = function
        self._memory = memory
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def __call__(self) -> Result:
        """The function's result. The next run of a graph overwrites its tensors."""
        if self._graph is None:
            if self._memory is None or self._runs < RUNS_BEFORE_CAPTURE:
                self._runs += 1
                return self._function()
            self._graph, self._result = self._memory.capture(self._function)
        assert self._result is not None
        self._graph.replay()
        return self._result

    def capture(self) -> None:
        """Run the function until it is a graph; nothing where there are no graphs."""
        while self._memory is not None and self._graph is None:
            self()
