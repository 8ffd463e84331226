"""A step of a fixed shape: its inputs lie where they lay, so that a GPU can replay it as one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from kernels.sampling import Parameters, Wish, sample
from live.graphs.buckets import StepShape
from live.graphs.resident import Resident
from live.graphs.staging import Arrays, size, views
from live.models.decoder import Decoder, Inputs, PagedCache


@dataclass(frozen=True)
class Opened:
    """What an open step leaves to look at.

    Attributes:
        hidden: (rows, hidden), before the final norm. normed: (picked, hidden). logits: (picked, vocabulary); None
            where the model has no LM head.
    """

    hidden: torch.Tensor
    normed: torch.Tensor
    logits: torch.Tensor | None


Result: TypeAlias = torch.Tensor | Opened
"""What a step gave, on the device: the tokens of a closed one, (picked,) int64; or what tokens are drawn from."""


class StaticStep:
    """One shape of step of one engine.

    Attributes:
        runs: how often it has run.

    What is staged for a run must not be staged over before the run's tokens have been waited for; there are two
    places for it in turn, so that one run may be waited for after the next was begun.
    """

    def __init__(self, shape: StepShape, decoder: Decoder, cache: PagedCache, resident: Resident) -> None:
        self.shape, self._decoder, self._cache, self._resident = shape, decoder, cache, resident
        device = resident.drawn.device
        on_gpu = device.type == "cuda"
        staged = [torch.zeros(size(shape), dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._staged = [(memory, {k: v.numpy() for k, v in views(shape, memory).items()}) for memory in staged]
        self._memory = torch.zeros(size(shape), dtype=torch.uint8, device=device)
        self.inputs = views(shape, self._memory)
        rows = shape.decodes + shape.chunks
        self._greedy = Parameters.of([Wish(temperature=0.0)] * rows, [0] * rows, device) if shape.closed else None
        self.runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def stage(self) -> Arrays:
        """The arrays of the next run, to be written over: rows that only fill up, all of them."""
        self._staged.reverse()
        memory, arrays = self._staged[0]
        memory.zero_()
        arrays["seats"].fill(self._resident.seats)
        arrays["slots"].fill(-1)
        return arrays

    def run(self) -> Result:
        """Send what was staged, and launch. A graph's result is written over by the step's next run."""
        self.runs += 1
        self._memory.copy_(self._staged[0][0], non_blocking=True)
        if self._graph is None:
            return self._launch()
        self._graph.replay()
        assert self._result is not None
        return self._result

    def run_empty(self) -> None:
        """Run with rows that only fill up: for what a first run costs."""
        self.stage()
        self.run()

    def capture(self, pool: Any) -> None:
        """Make a graph of it. It must have run, since a graph holds no kernel that is still to be compiled.

        `pool`: of `torch.cuda.graph_pool_handle`, whose memory graphs share that are replayed one after the other.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._result = self._launch()
        self._graph = graph

    @property
    def captured(self) -> bool:
        """Whether it is a graph by now."""
        return self._graph is not None

    def parameters(self, *, greedy: bool, filtered: bool) -> Parameters:
        """What an open step's tokens are drawn by, as it was staged."""
        x = self.inputs
        return Parameters(
            x["temperature"], x["top_k"], x["top_p"], x["min_p"], x["seeds"], x["places"], greedy, filtered
        )

    def _launch(self) -> Result:
        hidden = self._decoder.forward(self._forward_inputs(), self._cache)
        picked = hidden[self.inputs["picked"]] if self.shape.chunks else hidden
        normed = self._decoder.normed(picked)
        has_head = self._decoder.weights.head is not None
        logits = self._decoder.logits(normed) if has_head else None
        if self._greedy is None:
            return Opened(hidden, normed, logits)
        assert logits is not None, "a model without LM head gives no tokens"
        tokens, _ = sample(logits, self._greedy)
        self._resident.keep(tokens, self.shape.decodes)
        return tokens

    def _forward_inputs(self) -> Inputs:
        x, d = self.inputs, self.shape.decodes
        tables, tokens = x["chunk_tables"][:0], x["prompt"]
        if d:
            tables = self._decode_tables()
            drawn = self._resident.drawn[x["source"].clamp(min=0)]
            tokens = torch.cat((torch.where(x["source"] < 0, x["given"], drawn), tokens))
        return Inputs(
            tokens=tokens,
            positions=x["positions"],
            slots=x["slots"],
            decode_tables=tables,
            decode_lengths=x["lengths"],
            chunk_tables=x["chunk_tables"],
            chunk_starts=x["chunk_starts"],
            chunk_contexts=x["chunk_contexts"],
        )

    def _decode_tables(self) -> torch.Tensor:
        """(decodes, blocks). A block that a token starts comes with the token's slot, and is entered from there."""
        x, d, resident = self.inputs, self.shape.decodes, self._resident.tables
        block_tokens = self._cache.keys.shape[2]
        blocks = (x["slots"][:d] // block_tokens).clamp(min=0).int()
        resident.index_put_((x["seats"], x["positions"][:d] // block_tokens), blocks)
        return resident[:, : self.shape.blocks].index_select(0, x["seats"])
