"""Runs a scheduled batch: index tensors, the forward pass, sampling, log-probabilities, and LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import SamplingMetadata, sample, top_logprobs
from live.block_pool import BlockPool
from live.device import PendingHostCopy
from live.generation import Generation, TopLogprobs
from live.input_batch import InputBatch, Ints, generation_of
from live.models.decoder import Decoder, Inputs, PagedCache
from live.models.lora import ActiveAdapters, Adapter, AdapterSlots, adapted
from schedulers.batches import Batch, Chunk
from schedulers.engine_config import EngineConfig
from schedulers.sequence import Sequence


class ModelRunnerOutput(NamedTuple):
    """The output of one step: tokens of decodes, first tokens, pooled outputs and log-probabilities by request."""

    decodes: list[Generation]
    tokens: list[int]
    first_tokens: list[tuple[Sequence, int]]
    pooled: dict[Sequence, npt.NDArray[np.float32]]
    logprobs: list[LogprobsResult]


PendingPooled: TypeAlias = list[tuple[list[tuple[int, Sequence]], PendingHostCopy]]
"""Copies of pooled rows to the host, each with the rows that are wanted and their sequences."""

Rows: TypeAlias = tuple[Ints, Ints, Ints]
"""Token ids, positions and slots."""

LABELLED = ("classify", "score", "rerank")
"""Tasks whose result the classification head produces, if there is one."""

AsyncModelRunnerOutput: TypeAlias = Callable[[], ModelRunnerOutput]
"""The output of a launched step; calling it waits for the step."""


class Executor:
    """Runs batches on one model and device. Steps are launched in the order in which the scheduler began them.

    `cache`: the blocks of `pool`, then scratch blocks for the tokens of one-shot prompts during their step.
    `forward`: computes the last layer's output from inputs, which are on the host if `inputs_on_host`.
    """

    def __init__(self, decoder: Decoder, pool: BlockPool, config: EngineConfig) -> None:
        self.decoder = decoder
        self.pool = pool
        longest = -(-decoder.config.max_position_embeddings // pool.block_size)
        self.input_batch = InputBatch(config.max_num_seqs, min(longest, pool.num_blocks), pool)
        self.device = decoder.weights.norm.device
        self._on_host = self.device.type == "cpu"
        blocks = pool.num_blocks + scratch_blocks(config)
        dtype = decoder.weights.norm.dtype
        self._metadata: tuple[int, SamplingMetadata] | None = None  # of the decodes, with the version they belong to
        self._inputs: tuple[tuple[int, int], Inputs] | None = None  # the same, with the version and the table width
        self.cache = PagedCache.allocate(decoder.config, blocks, pool.block_size, dtype, str(self.device))
        self.inputs_on_host = self._on_host
        self.forward: Callable[[Inputs], torch.Tensor] = partial(decoder.forward, cache=self.cache)

    def freeze_graphs(self) -> None:
        """Do now what would otherwise delay a later step that is to be timed. This executor has nothing to do."""

    def launch(self, batch: Batch) -> AsyncModelRunnerOutput:
        """Run one step. This executor has finished it on return."""
        with torch.inference_mode():  # as a decorator it costs 5 µs a step, and so 2.5
            output = self.output(batch, self.forward(self.step_inputs(batch)))
        return lambda: output

    def output(self, batch: Batch, hidden: torch.Tensor) -> ModelRunnerOutput:
        """The output of a step, from the last layer's output (n, hidden). The step's `step_inputs` came before."""
        return self._sample_mixed(batch, hidden) if batch.chunks else self._sample_decodes(hidden)

    def _sample_decodes(self, hidden: torch.Tensor) -> ModelRunnerOutput:
        """The output of a step without prompts: a token for each decode."""
        decodes = self.input_batch
        logits = self.decoder.logits(self.decoder.normed(hidden))
        sampled, logprobs = sample(logits, self._decode_metadata())
        tokens = self._keep_tokens(sampled)
        results = sampled_logprobs(decodes.generations, logits, logprobs) if decodes.wants_logprobs else []
        return ModelRunnerOutput(decodes.generations, tokens, [], {}, results)

    def _sample_mixed(self, batch: Batch, hidden: torch.Tensor) -> ModelRunnerOutput:
        """The output of a step with prompts: tokens for decodes and completed prompts, or pooled states."""
        decodes, n = self.input_batch, len(self.input_batch)
        tokens, results, output = self._sample_rows(batch, hidden, decodes.generations, decodes.lengths[:n].tolist())
        decodes.first_tokens = dict(output.first_tokens)
        return output._replace(decodes=decodes.generations, tokens=tokens, logprobs=[*output.logprobs, *results])

    def _sample_rows(
        self, batch: Batch, hidden: torch.Tensor, owners: list[Generation], positions: list[int]
    ) -> tuple[list[int], list[LogprobsResult], ModelRunnerOutput]:
        """The tokens of a step's rows of decodes, log-probabilities of sampled tokens, and the output of prompts.

        `owners`, `positions`: of each row of decodes, its generation and the position of its token.
        """
        n = len(owners)
        prompt_logprobs = self._prompt_logprobs(batch, hidden[n:])
        completed = self._completed(batch, n)
        if not (n or completed):
            return [], [], ModelRunnerOutput([], [], [], {}, prompt_logprobs)
        rows = [*range(n), *(row for row, _ in completed)]
        normed = self.decoder.normed(hidden[torch.tensor(rows, device=self.device)])
        pooled = read_pooled(self._pooled([(i, sequence) for i, (_, sequence) in enumerate(completed)], normed[n:]))
        generating = [i for i, (_, sequence) in enumerate(completed) if wants_token(sequence)]
        sequences = [completed[i][1] for i in generating]
        if not (n or sequences):
            return [], [], ModelRunnerOutput([], [], [], pooled, prompt_logprobs)
        if len(generating) < len(completed):
            normed = normed[[*range(n), *(n + i for i in generating)]]
        generations = [*owners, *map(generation_of, sequences)]
        logits = self.decoder.logits(normed)
        positions = [*positions, *(next_position(sequence) for sequence in sequences)]
        sampled, logprobs = sample(logits, self._sampling_metadata(generations, positions))
        tokens = self._keep_tokens(sampled)
        first = list(zip(sequences, tokens[n:], strict=True))
        results = sampled_logprobs(generations, logits, logprobs)
        return tokens[:n], results, ModelRunnerOutput([], [], first, pooled, prompt_logprobs)

    def _keep_tokens(self, sampled: torch.Tensor) -> list[int]:
        """Tokens (rows,), decodes first, as Python numbers; those of the decodes become the next step's input."""
        tokens: Ints = (sampled if self._on_host else sampled.cpu()).numpy()
        n = len(self.input_batch)
        self.input_batch.tokens[:n] = tokens[:n]
        return cast(list[int], tokens.tolist())

    def step_inputs(self, batch: Batch) -> Inputs:
        """The inputs of the next step; moves on to it."""
        decodes = self.input_batch
        decodes.advance(batch)
        if batch.chunks:
            return self._make_inputs(batch.chunks)
        key = decodes.version, decodes.width
        if self._inputs is None or self._inputs[0] != key or not self.inputs_on_host:
            self._inputs = key, self._make_inputs(())
        return self._inputs[1]  # on the host its tensors are views of the arrays, which `advance` has updated

    def _make_inputs(self, chunks: Many[Chunk]) -> Inputs:
        decodes, n = self.input_batch, len(self.input_batch)
        rows = (decodes.tokens[:n], decodes.positions[:n], decodes.slots[:n])
        return self._inputs_with(rows, decodes.tables[:n, : decodes.width], decodes.lengths[:n], chunks)

    def _inputs_with(
        self, decodes: Rows, tables: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], chunks: Many[Chunk]
    ) -> Inputs:
        """The inputs of decodes, with their block tables and lengths, and of chunks."""
        chunk_tables = self._tables(chunks)
        parts = [self._chunk(chunk, table) for chunk, table in zip(chunks, chunk_tables, strict=True)]
        columns = zip(decodes, *parts, strict=True)
        tokens, positions, slots = (np.concatenate(column) for column in columns) if chunks else decodes
        return Inputs(
            tokens=self._send(tokens),
            positions=self._send(positions),
            slots=self._send(slots),
            decode_tables=self._send(tables),
            decode_lengths=self._send(lengths),
            chunk_tables=self._send(chunk_tables),
            chunk_starts=self._send(np.cumsum([0, *(chunk.tokens for chunk in chunks)], dtype=np.int32)),
            chunk_contexts=self._send(np.array([chunk.context for chunk in chunks], dtype=np.int32)),
        )

    def _chunk(self, chunk: Chunk, table: npt.NDArray[np.int32]) -> Rows:
        """Token ids, positions and slots of a prompt chunk."""
        end, size = chunk.context + chunk.tokens, self.pool.block_size
        positions = np.arange(chunk.context, end)
        slots = table[positions // size].astype(np.int64) * size + positions % size
        return self._chunk_tokens(chunk), positions, slots

    def _chunk_tokens(self, chunk: Chunk) -> Ints:
        return generation_of(chunk.sequence).tokens(chunk.context, chunk.context + chunk.tokens)

    def _tables(self, chunks: Many[Chunk]) -> npt.NDArray[np.int32]:
        """(chunks, blocks): the block ids of each sequence, with scratch blocks for one-shot prompts."""
        scratch, lists = self.pool.num_blocks, []
        for chunk in chunks:
            blocks = self.pool.table(chunk.sequence.blocks)
            missing = -(-(chunk.context + chunk.tokens) // self.pool.block_size) - len(blocks)
            if missing > 0:
                blocks = [*blocks, *range(scratch, scratch + missing)]
                scratch += missing
            lists.append(blocks)
        tables = np.zeros((len(lists), max(map(len, lists), default=0)), dtype=np.int32)
        for i, blocks in enumerate(lists):
            tables[i, : len(blocks)] = blocks
        return tables

    def _completed(self, batch: Batch, end: int) -> list[tuple[int, Sequence]]:
        """The last row of each prompt that the step completes, with its sequence. `end`: rows of decodes."""
        completed = []
        for chunk in batch.chunks:
            end += chunk.tokens
            if chunk.last:
                completed.append((end - 1, chunk.sequence))
        return completed

    def _pooled(self, completed: Many[tuple[int, Sequence]], normed: torch.Tensor) -> PendingPooled:
        """Start the copies of pooled outputs. `completed`: rows of `normed`, with their sequences."""
        pending: PendingPooled = []
        has_labels = bool(self.decoder.config.labels)
        for labelled in (False, True):
            rows = [
                (row, sequence)
                for row, sequence in completed
                if not wants_token(sequence) and (has_labels and sequence.request.task in LABELLED) is labelled
            ]
            if rows:
                pooled = self.decoder.labels(normed) if labelled else normed
                pending.append((rows, PendingHostCopy(pooled.float())))
        return pending

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> list[LogprobsResult]:
        """Log-probabilities of prompt tokens, for requests that want them. `hidden`: the rows of the chunks."""
        results, row = [], 0
        for chunk in batch.chunks:
            generation = generation_of(chunk.sequence)
            if generation.prompt_logprobs >= 0:
                rows = hidden[row : row + chunk.tokens]
                results.append(prompt_chunk_logprobs(self.decoder, rows, generation, chunk.context))
            row += chunk.tokens
        return results

    def _sampling_metadata(self, generations: Many[Generation], positions: Many[int]) -> SamplingMetadata:
        return SamplingMetadata.of([generation.sampling_params for generation in generations], positions, self.device)

    def _decode_metadata(self) -> SamplingMetadata:
        """The sampling metadata of the decodes: rebuilt when the decodes change, otherwise moved on by one position."""
        decodes = self.input_batch
        if self._metadata is None or self._metadata[0] != decodes.version:
            positions = decodes.lengths[: len(decodes)].tolist()
            self._metadata = (decodes.version, self._sampling_metadata(decodes.generations, positions))
        elif not self._metadata[1].greedy:  # greedy sampling does not use positions
            self._metadata[1].positions.copy_(torch.from_numpy(decodes.lengths[: len(decodes)]))
        return self._metadata[1]

    def _send(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.inputs_on_host else tensor.to(self.device)


def scratch_blocks(config: EngineConfig) -> int:
    """Blocks that the one-shot prompts of a single step may need beyond the KV cache's own."""
    budget = config.one_shot
    if budget is None:
        return 0
    tokens = min(budget.max_step_tokens(), config.max_num_batched_tokens)
    return -(-tokens // config.block_size) + min(budget.sequences, tokens)


def read_pooled(pending: PendingPooled) -> dict[Sequence, npt.NDArray[np.float32]]:
    """`ModelRunnerOutput.pooled`; waits for the copies."""
    pooled: dict[Sequence, npt.NDArray[np.float32]] = {}
    for rows, copy in pending:
        pooled |= {sequence: copy.numpy()[row] for row, sequence in rows}
    return pooled


def next_position(sequence: Sequence) -> int:
    """The position behind a prompt that was just computed, by the scheduler: a step may be in flight."""
    return sequence.num_tokens_to_compute


def wants_token(sequence: Sequence) -> bool:
    """True if a request produces tokens, false for a pooling request."""
    return sequence.request.task == "generate"


CHUNK_ROWS = 256
"""Prompt tokens whose logits are computed together. Each row of logits takes 4 bytes · vocabulary."""


@dataclass(frozen=True)
class LogprobsResult:
    """The log-probabilities of one request's tokens in one step; `position`: of the first prompt token, -1: output."""

    generation: Generation
    position: int
    token_logprobs: list[float]
    top_logprobs: list[TopLogprobs]

    def store(self) -> None:
        """Append to the generation's output tokens, or fill in prompt positions, which a preemption may recompute."""
        generation = self.generation
        if self.position < 0:
            generation.token_logprobs += self.token_logprobs
            generation.top_logprobs += self.top_logprobs
            return
        if not generation.prompt_token_logprobs:
            generation.prompt_token_logprobs = [None] * len(generation.prompt)
            generation.prompt_top_logprobs = [[] for _ in generation.prompt]
        end = self.position + len(self.token_logprobs)
        generation.prompt_token_logprobs[self.position : end] = self.token_logprobs
        generation.prompt_top_logprobs[self.position : end] = self.top_logprobs


def sampled_logprobs(
    generations: Many[Generation], logits: torch.Tensor, logprobs: torch.Tensor
) -> list[LogprobsResult]:
    """The results of the tokens just sampled, where wanted; logits (rows, vocabulary), logprobs (rows,)."""
    rows = [i for i, generation in enumerate(generations) if generation.logprobs >= 0]
    if not rows:
        return []
    sampled = logprobs[rows].tolist()
    tops = _top_logprobs(logits[rows], max(generations[i].logprobs for i in rows))
    return [
        LogprobsResult(generations[i], -1, [sampled[j]], [tops[j][: generations[i].logprobs]])
        for j, i in enumerate(rows)
    ]


def prompt_chunk_logprobs(
    decoder: Decoder, hidden: torch.Tensor, generation: Generation, context: int
) -> LogprobsResult:
    """The log-probabilities of the tokens that follow a chunk's; `hidden`: (chunk tokens, hidden), not normed."""
    targets = torch.from_numpy(generation.prompt[context + 1 : context + 1 + len(hidden)]).to(hidden.device)
    logprobs: list[float] = []
    tops: list[TopLogprobs] = []
    for begin in range(0, len(targets), CHUNK_ROWS):
        part = targets[begin : begin + CHUNK_ROWS]
        logits = decoder.logits(decoder.normed(hidden[begin : begin + len(part)])).float()
        logit = logits.gather(1, part[:, None])[:, 0]
        logprobs += (logit - logits.logsumexp(dim=-1)).tolist()
        tops += _top_logprobs(logits, generation.prompt_logprobs)
    return LogprobsResult(generation, context + 1, logprobs, tops)


def _top_logprobs(logits: torch.Tensor, n: int) -> list[TopLogprobs]:
    if n == 0:
        return [[] for _ in range(len(logits))]
    tokens, values = top_logprobs(logits, min(n, logits.shape[-1]))
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]


class LoRAExecutor(Executor):
    """An executor that computes the adapters of a batch beside the base model.

    Those that the scheduler has put into slots are copied to the device when their first step is launched. Rows are
    grouped by adapter, or with `fixed` computed by `AdapterSlots`, as captured steps ask for; then `slot_of` has the
    number of each loaded adapter's slot, and `slots` nothing.
    """

    def __init__(
        self, decoder: Decoder, pool: BlockPool, config: EngineConfig, adapters: Many[Adapter], *, fixed: bool = False
    ) -> None:
        self._active = ActiveAdapters()
        super().__init__(adapted(decoder, self._active), pool, config)
        assert config.model_slots is not None, "adapters have slots"
        self.slots: dict[str, Adapter] = {}
        self._base = config.model_slots.base
        self._in_host = {adapter.name: adapter for adapter in adapters}
        self._grouped = -1  # version of the decodes that the active adapters are of; -1: of a step with prompts
        self._numbers = list(range(config.model_slots.slots))  # of free slots
        self.slot_of: dict[str, int] = {}
        if fixed:
            self._active.slots = AdapterSlots(adapters, len(self._numbers), decoder.weights.norm)
            self.forward = self._forward_with_slots

    def step_inputs(self, batch: Batch) -> Inputs:
        """See `Executor.step_inputs`; the batch's adapters are active from now on."""
        inputs = super().step_inputs(batch)
        for load in batch.loads:
            self._load(load.model, load.replaces)
        decodes, fixed = self.input_batch, self._active.slots
        if fixed is None and not batch.chunks and self._grouped == decodes.version:
            return inputs
        rows = [*decodes.sequences]
        for chunk in batch.chunks:
            rows += [chunk.sequence] * chunk.tokens
        if fixed is not None:
            numbers = [self.slot_of.get(sequence.request.model, -1) for sequence in rows]
            return replace(inputs, adapters=torch.tensor(numbers, dtype=torch.int64))
        self._active.groups = self._groups(rows)
        self._grouped = -1 if batch.chunks else decodes.version
        return inputs

    def _load(self, model: str, replaces: str) -> None:
        adapter = self._in_host[model]
        if self._active.slots is None:
            self.slots.pop(replaces, None)
            self.slots[model] = adapter.to(self.device)
            return
        if replaces in self.slot_of:
            self._numbers.append(self.slot_of.pop(replaces))
        slot = self.slot_of[model] = self._numbers.pop()
        self._active.slots.write(slot, adapter)

    def _forward_with_slots(self, inputs: Inputs) -> torch.Tensor:
        assert self._active.slots is not None
        assert inputs.adapters is not None
        self._active.slots.choose(inputs.adapters)
        return self.decoder.forward(inputs, self.cache)

    def _groups(self, rows: Many[Sequence]) -> list[tuple[Adapter, slice | torch.Tensor]]:
        by_model: dict[str, list[int]] = {}
        for row, sequence in enumerate(rows):
            if sequence.request.model != self._base:
                by_model.setdefault(sequence.request.model, []).append(row)
        groups: list[tuple[Adapter, slice | torch.Tensor]] = []
        for model, model_rows in by_model.items():
            neighbours = model_rows[-1] - model_rows[0] + 1 == len(model_rows)
            index = (
                slice(model_rows[0], model_rows[-1] + 1) if neighbours else torch.tensor(model_rows, device=self.device)
            )
            groups.append((self.slots[model], index))
        return groups
