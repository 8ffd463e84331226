"""Forward passes of executors that make their inputs anew in each step, padded, and on a GPU replayed as graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from live.executor import Executor
from live.graphs.capture_sizes import CaptureSizes, StepShape
from live.graphs.captured_call import CapturedCall, GraphMemory
from live.graphs.staging import Fields, size, views
from live.models.decoder import Inputs
from schedulers.engine_config import EngineConfig

Forward = Callable[[Inputs], torch.Tensor]

ROW_FIELDS = ("tokens", "positions", "slots", "adapters")
"""Inputs that have a value for each row; of a padding row 0, and -1 in the last two."""


def pad_steps(executor: Executor, config: EngineConfig) -> PaddedForward:
    """Let an executor run padded steps from now on; on a GPU those of decodes alone are captured here."""
    longest = -(-executor.decoder.config.max_position_embeddings // executor.pool.block_size)
    sizes = CaptureSizes.of(config, executor.input_batch.tables.shape, longest)
    executor.forward = padded = PaddedForward(executor.forward, sizes, executor.device)
    executor.inputs_on_host = True
    if executor.device.type == "cuda":
        padded.capture(sizes.decode_shapes())
    return padded


class PaddedForward:
    """A forward pass, from inputs on the host to the last layer's output.

    A shape becomes a graph after `RUNS_BEFORE_CAPTURE` runs. The next call overwrites the output.
    """

    def __init__(self, forward: Forward, sizes: CaptureSizes, device: torch.device) -> None:
        self._forward = forward
        self._sizes = sizes
        self._device = device
        self._memory = GraphMemory.on(device)
        self._steps: dict[StepShape, tuple[PaddedInputs, CapturedCall[torch.Tensor]]] = {}

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """The output of all rows, (n, hidden)."""
        n, d = len(inputs.tokens), inputs.decodes
        width = max(1, inputs.decode_tables.shape[1], inputs.chunk_tables.shape[1])
        shape = self._sizes.shape(d, inputs.chunks, n - d, width, greedy_only=False)  # nothing is sampled here
        if not shape.captured:
            return self._forward(on_device(inputs, self._device))
        padded, run = self._step(shape)
        padded.fill(inputs)
        hidden, begin = run(), shape.decodes
        return hidden[:n] if d in (n, begin) else torch.cat((hidden[:d], hidden[begin : begin + n - d]))

    @torch.inference_mode()
    def capture(self, shapes: list[StepShape]) -> None:
        """Compile and capture steps of greedy shapes, whose rows so far are padding."""
        for shape in shapes:
            self._step(replace(shape, greedy_only=False))[1].capture()

    def _step(self, shape: StepShape) -> tuple[PaddedInputs, CapturedCall[torch.Tensor]]:
        step = self._steps.get(shape)
        if step is None:
            padded = PaddedInputs(shape, self._device)
            step = padded, CapturedCall(partial(self._forward, padded.inputs), self._memory)
            self._steps[shape] = step
        return step


class PaddedInputs:
    """Inputs of one shape that stay at the same addresses. At first all rows are padding. `inputs`: on the device."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        layout = _fields(shape)
        self._decodes = shape.decodes
        self._host, self._memory = (torch.zeros(size(layout), dtype=torch.uint8, device=d) for d in ("cpu", device))
        self._staged = views(layout, self._host)
        tensors: dict[str, Any] = {**views(layout, self._memory)}
        self.inputs = Inputs(**tensors)
        for name in ("slots", "adapters"):
            getattr(self.inputs, name).fill_(-1)

    def fill(self, inputs: Inputs) -> None:
        """Send a step's inputs, which are on the host; the other rows become padding, which writes no cache."""
        self._host.zero_()
        staged, n, d, begin = self._staged, len(inputs.tokens), inputs.decodes, self._decodes
        for name in ("slots", "adapters"):
            staged[name].fill_(-1)
        for name in ROW_FIELDS:
            rows = getattr(inputs, name)
            if rows is not None:
                staged[name][:d] = rows[:d]
                staged[name][begin : begin + n - d] = rows[d:]
        staged["chunk_starts"].fill_(n - d)
        for name in ("decode_tables", "decode_lengths", "chunk_tables", "chunk_starts", "chunk_contexts"):
            values = getattr(inputs, name)
            staged[name][tuple(slice(extent) for extent in values.shape)] = values
        self._memory.copy_(self._host)


def on_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The inputs of a step that is not padded."""
    if device.type == "cpu":
        return inputs
    tensors: dict[str, Any] = {name: part.to(device) for name, part in vars(inputs).items() if torch.is_tensor(part)}
    return replace(inputs, **tensors)


def _fields(shape: StepShape) -> Fields:
    """Type and shape of the tensors of `Inputs`."""
    d, c, n = shape.decodes, shape.chunks, shape.tokens
    rows: Fields = {name: (torch.int64, (d + n,)) for name in ROW_FIELDS}
    return rows | {
        "decode_tables": (torch.int32, (d, shape.blocks)),
        "decode_lengths": (torch.int32, (d,)),
        "chunk_tables": (torch.int32, (c, shape.blocks)),
        "chunk_starts": (torch.int32, (c + 1,)),
        "chunk_contexts": (torch.int32, (c,)),
    }
