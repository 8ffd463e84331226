"""A function of tensors at fixed addresses that becomes a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

RUNS_BEFORE_CAPTURE = 2
"""Runs kernel by kernel before the capture: the first compiles the kernels, which a graph cannot hold."""

Result = TypeVar("Result")


class CapturedCall(Generic[Result]):
    """Calls a function, and after a few runs replays it as a graph.

    Args:
        function: reads and writes tensors whose addresses do not change, and waits for nothing.
        memory: from `torch.cuda.graph_pool_handle`, for graphs that never run at the same time; None: no graphs.
    """

    def __init__(self, function: Callable[[], Result], memory: Any) -> None:
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
            self._capture()
        assert self._graph is not None
        assert self._result is not None
        self._graph.replay()
        return self._result

    @property
    def captured(self) -> bool:
        """True if the function is a graph."""
        return self._graph is not None

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._result = self._function()
        self._graph = graph
