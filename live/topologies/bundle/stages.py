"""The stages of a layer as a bundle's workers run them: kernel by kernel, or as CUDA graphs of padded sizes.

A decode step has the same kernels at each layer, and they are short: launching them takes the host longer than the GPU
needs to run them. So each layer's stage becomes a graph for each padded number of rows. Steps with prompt chunks vary
too much and run kernel by kernel. On a CPU the padded stages run kernel by kernel, with the same results.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from live.engine import Engine
from live.executor import ModelRunnerOutput
from live.graphs.capture_sizes import WIDTHS, StepShape, at_least, powers, sizes
from live.graphs.captured_call import CapturedCall, GraphMemory
from live.graphs.padded_forward import PaddedInputs, on_device
from live.models.decoder import Decoder, FFNRows, Inputs, PagedCache, ffn_stage, with_decode_work
from live.models.weights import FFN
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


class FFNStages:
    """The FFN stages of one FFN instance, kernel by kernel."""

    def __init__(self, ffns: Sequence[FFN]) -> None:
        self._ffns = ffns

    def layer(self, index: int, rows: FFNRows) -> torch.Tensor:
        """One layer's FFN stage, (n, hidden), in memory of its own."""
        return ffn_stage(self._ffns[index], rows)


class GraphedFFNStages(FFNStages):
    """`FFNStages` of padded sizes up to `max_rows`, on a GPU as graphs."""

    def __init__(self, ffns: Sequence[FFN], max_rows: int = 2048) -> None:
        super().__init__(ffns)
        self._sizes = sizes(max_rows, 2)
        self._memory: GraphMemory | None = None
        self._inputs: dict[int, FFNRows] = {}
        self._calls: dict[tuple[int, int], CapturedCall[torch.Tensor]] = {}

    def layer(self, index: int, rows: FFNRows) -> torch.Tensor:
        n = rows.hidden.shape[0]
        if n > self._sizes[-1]:
            return super().layer(index, rows)
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
