"""Runs batches as padded steps whose inputs stay on the device.

No data pass from one step to the next through the host: input tokens are read where they were sampled,
block tables stay on the device, and a new block is entered from its token's slot. So a step can be launched before the
host knows the tokens of the one before.

A shape becomes a CUDA graph after it has been met `CAPTURE_AFTER` times, or when `freeze_graphs` captures all that have
been met. Until then it runs as the smallest graph that holds it, or kernel by kernel: on the first way to its own
graph, which compiles its kernels, and where padding would cost more than launching does. On a CPU there are no graphs,
and the same padded steps run kernel by kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import SamplingMetadata, sample
from live.block_pool import BlockPool
from live.device import PendingHostCopy
from live.executor import (
    AsyncModelRunnerOutput,
    Executor,
    LogprobsResult,
    ModelRunnerOutput,
    PendingPooled,
    next_position,
    read_pooled,
    sampled_logprobs,
    wants_token,
)
from live.graphs.buffers import Arrays, DeviceBuffers, Fields, SamplingBatch, size, views
from live.graphs.capture_sizes import SDPA_TOKENS, CaptureSizes, StepShape
from live.graphs.step import CapturedCall, GraphMemory, Result, StaticStep, UnsampledOutput
from live.input_batch import InputBatch, generation_of
from live.models.decoder import Decoder, Inputs
from schedulers.batches import Batch
from schedulers.engine_config import EngineConfig
from schedulers.sequence import Sequence

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


CAPTURE_AFTER = 8
"""Times that a shape is met before it is captured. Capturing takes as long as a few uncaptured steps, and a shape that
was met so often is expected to be met as often again."""

MOST_EXTRA_ROWS = 512
"""Padding rows for which a step runs as a larger graph: on an H200 they take 1 ms of Qwen3-0.6B and 12 ms of
Llama-3.1-8B, where launching its kernels one by one took the host 14 ms in which the GPU had little to do."""

MAX_GRAPHS = 1024
"""Graphs after which shapes are no longer captured: each graph takes megabytes for its launches alone."""

Completing = list[Sequence | None]
"""The sequence that each chunk completes, by chunk, for sequences that produce tokens."""


class GraphExecutor(Executor):
    """Runs batches as padded steps, as graphs on a GPU.

    The output of a step must be waited for before the step after the next is launched.

    Attributes:
        capture_sizes: the sizes that steps are padded to. steps: the steps that have run, by shape.
        buffers: what stays on the device.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig, *, graphs: bool = True) -> None:
        super().__init__(decoder, pool, config)
        longest = -(-decoder.config.max_position_embeddings // pool.block_size)
        self.capture_sizes = sizes = CaptureSizes.of(config, self.input_batch.tables.shape, longest)
        self.buffers = DeviceBuffers(sizes.decodes_alone[-1], sizes.chunks[-1], sizes.blocks[-1], self.device)
        self.steps: dict[StepShape, StaticStep] = {}
        self._met: Counter[StepShape] = Counter()
        self._graphs = 0
        self._frozen = False
        self._memory = GraphMemory.on(self.device) if graphs else None
        self._sdpa = decoder.attention_backend == "sdpa"
        self._version = self.input_batch.version
        self._decode_sampling = SamplingBatch(())

    def launch(self, batch: Batch) -> AsyncModelRunnerOutput:
        """Pad one step, send its inputs and launch it, without waiting for its output."""
        with torch.inference_mode():
            return self._launch(batch)

    def _launch(self, batch: Batch) -> AsyncModelRunnerOutput:
        decodes = self.input_batch
        decodes.advance(batch)
        if self._version != decodes.version:
            self._version = decodes.version
            self._decode_sampling = SamplingBatch(decodes.generations)
            self.buffers.update(decodes)
        completing = [c.sequence if c.last and wants_token(c.sequence) else None for c in batch.chunks]
        sampling = SamplingBatch([generation_of(sequence) for sequence in completing if sequence is not None])
        step = self._next_step(self._shape(batch, self._decode_sampling.greedy and sampling.greedy))
        arrays = step.stage()
        self._stage_decodes(arrays)
        if batch.chunks:
            self._stage_chunks(arrays, batch, step.shape)
        if not step.shape.greedy_only:
            self._stage_sampling(arrays, step.shape.decodes, completing, sampling)
        result = step.run()
        self.buffers.latest = decodes.sequences, completing
        return self._output(step, result, batch, completing, sampling)

    def reset(self, pool: BlockPool) -> GraphExecutor:
        """Start again with another, empty pool of the same size; the captured graphs stay valid."""
        assert pool.num_blocks == self.pool.num_blocks, "the KV cache has a fixed size"
        if not self._on_host:
            torch.cuda.synchronize(self.device)  # steps may still run whose output was never waited for
        self.pool = pool
        self.input_batch = InputBatch(*self.input_batch.tables.shape, pool)
        self._version = self.input_batch.version
        self._decode_sampling = SamplingBatch(())
        self.buffers.clear()
        return self

    def capture_ahead(self) -> None:
        """Compile and capture what serving begins with: greedy steps of decodes and, on a GPU, of prompts."""
        prompts = [] if self._on_host else self.capture_sizes.prompt_shapes(sdpa=self._sdpa)
        if self.decoder.weights.head is not None:
            self.warm_up([*prompts, *self.capture_sizes.decode_shapes()])

    @torch.inference_mode()
    def warm_up(self, shapes: Many[StepShape]) -> None:
        """Compile and capture shapes before the first request. The KV cache is not written."""
        for shape in shapes:
            self._capture_empty(self._step(shape))

    @torch.inference_mode()
    def freeze_graphs(self) -> None:
        """Capture all shapes that have been met, the most frequent first, and capture no more from now on.

        Steps that are timed afterwards contain no captures. The engine must have no requests.
        """
        self._frozen = True
        for shape, _ in self._met.most_common():
            self._capture_empty(self._step(shape))

    def _capture_empty(self, step: StaticStep) -> None:
        """Run a step without requests, which compiles its kernels, and capture it."""
        if step.captured:
            return
        if step.runs == 0:
            step.run_empty()
        if self._capture(step):
            step.run_empty()

    def _shape(self, batch: Batch, greedy: bool) -> StepShape:
        """The padded shape of a batch. It is `greedy_only` if no request wants more than the most likely token."""
        decodes, size = self.input_batch, self.pool.block_size
        ends = [-(-(chunk.context + chunk.tokens) // size) for chunk in batch.chunks]
        greedy_only = greedy and not decodes.wants_logprobs and self.decoder.weights.head is not None
        for chunk in batch.chunks:
            generation = generation_of(chunk.sequence)
            logprobs = max(generation.logprobs, generation.prompt_logprobs)
            greedy_only = greedy_only and wants_token(chunk.sequence) and logprobs < 0
        blocks, tokens = max([decodes.width, *ends]), batch.prefill_tokens
        no_context = self._sdpa and tokens >= SDPA_TOKENS and len(ends) == 1 and batch.chunks[0].context == 0
        return self.capture_sizes.shape(len(decodes), len(ends), tokens, blocks, greedy_only, no_context=no_context)

    def _step(self, shape: StepShape) -> StaticStep:
        """The step of exactly this shape."""
        if not shape.captured:
            return StaticStep(shape, self.decoder, self.cache, self.buffers)
        step = self.steps.get(shape)
        if step is None:
            step = self.steps[shape] = StaticStep(shape, self.decoder, self.cache, self.buffers)
        return step

    def _next_step(self, shape: StepShape) -> StaticStep:
        """The step that a batch of this shape runs as: its own or, as long as that is no graph, a larger one."""
        step = self._step(shape)
        if self._memory is None or step.captured or not shape.captured:
            return step
        self._met[shape] += 1
        if not self._frozen and self._met[shape] >= CAPTURE_AFTER:
            if step.runs:
                self._capture(step)
            return step
        larger = [other for other in self.steps.values() if other.captured and other.shape.holds(shape)]
        smallest = min(larger, key=lambda other: other.shape.cost, default=step)
        return smallest if smallest.shape.rows - shape.rows <= MOST_EXTRA_ROWS else step

    def _capture(self, step: StaticStep) -> bool:
        """Capture a step that has run, if there are graphs and not too many; returns whether it was captured."""
        if self._memory is None or step.captured or self._graphs >= MAX_GRAPHS:
            return False
        step.capture_in(self._memory)
        self._graphs += 1
        return True

    # -- inputs ------------------------------------------------------------------------------------------------------

    def _stage_decodes(self, arrays: Arrays) -> None:
        decodes, n = self.input_batch, len(self.input_batch)
        size, sources = self.pool.block_size, self.buffers.token_sources(decodes.sequences)
        arrays["table_rows"][:n] = self.buffers.decode_rows
        arrays["table_columns"][:n] = decodes.positions[:n] // size
        arrays["table_blocks"][:n] = decodes.slots[:n] // size
        arrays["token_sources"][:n] = sources
        arrays["tokens"][:n] = decodes.tokens[:n] * (sources == self.buffers.no_token)
        arrays["positions"][:n] = decodes.positions[:n]
        arrays["slots"][:n] = decodes.slots[:n]
        arrays["lengths"][:n] = decodes.lengths[:n]

    def _stage_chunks(self, arrays: Arrays, batch: Batch, shape: StepShape) -> None:
        tables = self._tables(batch.chunks)
        needed = tables[:, : shape.blocks]  # later columns are blocks reserved for the output
        arrays["chunk_tables"][: needed.shape[0], : needed.shape[1]] = needed
        arrays["logits_indices"][: shape.decodes] = np.arange(shape.decodes)
        end = 0
        for i, chunk in enumerate(batch.chunks):
            begin, end = end, end + chunk.tokens
            rows = slice(shape.decodes + begin, shape.decodes + end)
            tokens, arrays["positions"][rows], arrays["slots"][rows] = self._chunk(chunk, tables[i])
            arrays["tokens"][rows] = tokens
            arrays["chunk_contexts"][i] = chunk.context
            arrays["chunk_starts"][i + 1 :] = end
            arrays["logits_indices"][shape.decodes + i] = rows.stop - 1

    def _stage_sampling(self, arrays: Arrays, decodes: int, completing: Completing, sampling: SamplingBatch) -> None:
        """Stage the sampling parameters of a step that is not `greedy_only`; padding rows are greedy.

        `decodes`: padded decode rows. `sampling`: of the sequences in `completing`.
        """
        n, completed = (
            len(self.input_batch),
            [(i, sequence) for i, sequence in enumerate(completing) if sequence is not None],
        )
        chunk_rows = np.array([decodes + i for i, _ in completed], dtype=np.int64)
        arrays["top_p"].fill(1.0)
        for part, rows in ((self._decode_sampling, np.arange(n)), (sampling, chunk_rows)):
            for name, column in part.columns().items():
                arrays[name][rows] = column
        arrays["next_positions"][:n] = self.input_batch.lengths[:n]
        for i, sequence in completed:
            arrays["next_positions"][decodes + i] = next_position(sequence)

    # -- outputs -----------------------------------------------------------------------------------------------------

    def _output(
        self, step: StaticStep, result: Result, batch: Batch, completing: Completing, sampling: SamplingBatch
    ) -> AsyncModelRunnerOutput:
        """Start the copies of a step's output to the host. Calling the result waits for them."""
        generations, d = self.input_batch.generations, step.shape.decodes
        results: list[LogprobsResult] = []
        pooled: PendingPooled = []
        tokens = None if isinstance(result, UnsampledOutput) else result
        first = [(d + i, sequence) for i, sequence in enumerate(completing) if sequence is not None]
        if isinstance(result, UnsampledOutput):
            results = self._prompt_logprobs(batch, result.hidden[d:])
            completed = [(i, chunk.sequence) for i, chunk in enumerate(batch.chunks) if chunk.last]
            pooled = self._pooled(completed, result.normed[d:])
            if result.logits is not None:
                tokens, logprobs = self._sample(step, result.logits, sampling)
                results += self._token_logprobs(result.logits, logprobs, first)
        copy = None if tokens is None else PendingHostCopy(tokens)

        def collect() -> ModelRunnerOutput:
            sampled: npt.NDArray[Any] = np.zeros(0) if copy is None else copy.numpy()
            first_tokens = [(sequence, int(sampled[row])) for row, sequence in first]
            decoded = sampled[: len(generations)].tolist()
            return ModelRunnerOutput(generations, decoded, first_tokens, read_pooled(pooled), results)

        return collect

    def _sample(
        self, step: StaticStep, logits: torch.Tensor, sampling: SamplingBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of a step that is not `greedy_only`, and their log-probabilities, (logits indices,) each."""
        decodes = self._decode_sampling
        greedy, filtered = decodes.greedy and sampling.greedy, decodes.filtered or sampling.filtered
        x = step.inputs
        columns = x["temperature"], x["top_k"], x["top_p"], x["min_p"], x["seeds"], x["next_positions"]
        tokens, logprobs = sample(logits, SamplingMetadata(*columns, greedy, filtered))
        self.buffers.keep(tokens, step.shape.decodes)
        return tokens, logprobs

    def _token_logprobs(
        self, logits: torch.Tensor, logprobs: torch.Tensor, first: list[tuple[int, Sequence]]
    ) -> list[LogprobsResult]:
        """Log-probabilities for the generations that want them. This waits for the device."""
        sampled = [*enumerate(self.input_batch.generations), *((row, generation_of(owner)) for row, owner in first)]
        by_row = {row: generation for row, generation in sampled if generation.logprobs >= 0}
        if not by_row:
            return []
        rows = torch.tensor([*by_row], device=self.device)
        return sampled_logprobs([*by_row.values()], logits[rows], logprobs[rows])
