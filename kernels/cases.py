"""Calls of operations that can be timed (`kernels.microbenchmark`), on random values; layers with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.decode_attention import decode_attention, decode_work
from kernels.error_compensator import Compensator, compensator
from kernels.microbenchmark import Case
from kernels.prefill_attention import prefill_attention, prompt_attention
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write, rope_table
from kernels.sampling import SamplingMetadata, SamplingParams, sample
from kernels.shapes import Shape
from kernels.silu_mul import silu_mul
from kernels.w4_gemm import PackedWeight, quantise

Call = Callable[[], object]

SAMPLING_KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "all": SamplingParams(seed=1),
    "filtered": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
}
"""Kinds of sampling. The last is the recommendation of Qwen3's model card."""


@dataclass(frozen=True)
class Cases:
    """The cases of one model's shapes on one device."""

    shape: Shape
    device: str
    dtype: torch.dtype
    block_size: int = 16

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def rms_norm(self, tokens: int) -> Case:
        """RMSNorm with its residual."""
        shape, size = self.shape, tokens * self.shape.hidden

        def prepare() -> Call:
            x, residual = (self._random(tokens, shape.hidden) for _ in range(2))
            weight = torch.ones(shape.hidden, device=self.device, dtype=self.dtype)
            return lambda: add_rms_norm(x, residual, weight, shape.epsilon)

        sizes = {"tokens": tokens, "hidden": shape.hidden}
        return Case("rms_norm", sizes, prepare, moved=4 * size * self.dtype.itemsize, flops=5 * size)

    def silu_mul(self, tokens: int) -> Case:
        """The activation."""
        size = tokens * self.shape.intermediate

        def prepare() -> Call:
            packed = self._random(tokens, 2 * self.shape.intermediate)
            return lambda: silu_mul(packed)

        sizes = {"tokens": tokens, "intermediate": self.shape.intermediate}
        return Case("silu_mul", sizes, prepare, moved=3 * size * self.dtype.itemsize, flops=5 * size)

    def rope_kv_write(self, tokens: int) -> Case:
        """Rotary positions of tokens, each written to a slot of its own, in random order."""
        shape, norms = self.shape, self.shape.qk_norm
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

        def prepare() -> Call:
            qkv, positions = self._random(tokens, width), torch.arange(tokens, device=self.device)
            blocks = -(-tokens // self.block_size)
            slots = torch.randperm(blocks * self.block_size, device=self.device)[:tokens]
            cos, sin = rope_table(shape.head_dim, tokens, shape.rope_theta, device=self.device)
            pages = blocks, self.block_size, shape.kv_heads, shape.head_dim
            caches = [torch.empty(pages, device=self.device, dtype=self.dtype) for _ in range(2)]
            norm = torch.ones(shape.head_dim, device=self.device, dtype=self.dtype) if norms else None
            return lambda: rope_kv_write(
                qkv, positions, slots, cos, sin, *caches, q_norm=norm, k_norm=norm, epsilon=shape.epsilon
            )

        moved = tokens * (2 * width * self.dtype.itemsize + 16 + 4 * shape.head_dim)
        flops = tokens * (shape.heads + shape.kv_heads) * shape.head_dim * (7 if norms else 3)
        sizes = {"tokens": tokens, **shape.heads_sizes(), "qk_norm": int(norms)}
        return Case("rope_kv_write", sizes, prepare, moved, flops)

    def sampling(self, sequences: int, kind: str) -> Case:
        """One of `SAMPLING_KINDS`."""
        vocabulary = self.shape.vocabulary

        def prepare() -> Call:
            logits = 3 * self._random(sequences, vocabulary)
            parameters = SamplingMetadata.of([SAMPLING_KINDS[kind]] * sequences, range(sequences), self.device)
            return lambda: sample(logits, parameters)

        size = sequences * vocabulary
        sizes = {"sequences": sequences, "vocabulary": vocabulary}
        return Case(f"sampling/{kind}", sizes, prepare, moved=size * self.dtype.itemsize, flops=4 * size)

    def decode_attention(self, batch: int, context: int, padded: Callable[[int], int] = lambda blocks: blocks) -> Case:
        """Sequences of one length, their pages in random order.

        `padded`: columns of a block table with so many blocks; what is launched depends on them.
        """
        shape, pages = self.shape, -(-context // self.block_size)

        def prepare() -> Call:
            tables, k, v = self._pages(batch, pages)
            lengths = torch.full((batch,), context, dtype=torch.int32, device=self.device)
            tables = torch.nn.functional.pad(tables, (0, padded(pages) - pages))
            q = self._random(batch, shape.heads, shape.head_dim)
            work = decode_work(lengths, tables, k)  # once for all layers of a step
            return lambda: decode_attention(q, k, v, tables, lengths, shape.head_dim**-0.5, work=work)

        sizes = {"batch": batch, "context": context, **shape.heads_sizes(), "block_size": self.block_size}
        elements = 2 * batch * (context * shape.kv_heads + shape.heads) * shape.head_dim
        flops = 4 * batch * context * shape.heads * shape.head_dim
        return Case("decode_attention", sizes, prepare, elements * self.dtype.itemsize, flops)

    def prefill_attention(self, batch: int, chunk: int, context: int) -> Case:
        """Chunks of one length behind contexts of one length; pages in random order."""
        shape, tokens = self.shape, context + chunk

        def prepare() -> Call:
            tables, k, v = self._pages(batch, -(-tokens // self.block_size))
            q = self._random(batch * chunk, shape.heads, shape.head_dim)
            bounds = torch.arange(0, batch * chunk + 1, chunk, dtype=torch.int32, device=self.device)
            contexts = torch.full((batch,), context, dtype=torch.int32, device=self.device)
            return lambda: prefill_attention(q, k, v, tables, bounds, contexts, shape.head_dim**-0.5)

        sizes = {"batch": batch, "chunk": chunk, "context": context}
        sizes |= {**shape.heads_sizes(), "block_size": self.block_size}
        elements = 2 * batch * (chunk * shape.heads + tokens * shape.kv_heads) * shape.head_dim
        pairs = batch * (chunk * context + chunk * (chunk + 1) // 2)
        flops = 4 * pairs * shape.heads * shape.head_dim
        return Case("prefill_attention", sizes, prepare, elements * self.dtype.itemsize, flops)

    def prompt_attention(self, tokens: int) -> Case:
        """One prompt without context, by PyTorch's attention, lying as an engine has it."""
        shape, paged = self.shape, self.prefill_attention(1, tokens, 0)

        def prepare() -> Call:
            turned = self._random(tokens, shape.heads + shape.kv_heads, shape.head_dim)
            qkv = self._random(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
            q, k, v = turned[:, : shape.heads], turned[:, shape.heads :], qkv[:, -shape.kv_heads :]
            return lambda: prompt_attention(q, k, v, shape.head_dim**-0.5)

        return Case("prompt_attention", paged.sizes, prepare, paged.moved, paged.flops)

    def _pages(self, sequences: int, pages: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The block tables of sequences with so many pages each, and the caches."""
        tables = torch.randperm(sequences * pages, device=self.device).view(sequences, pages).to(torch.int32)
        size = (sequences * pages, self.block_size, self.shape.kv_heads, self.shape.head_dim)
        return tables, self._random(*size), self._random(*size)


def random_layer(
    outputs: int, inputs: int, rank: int, group: int, device: str, bits: int = 4
) -> tuple[PackedWeight, Compensator]:
    """A layer with random weights and a random compensator."""
    weight = torch.randn(outputs, inputs, device=device) * inputs**-0.5
    return quantise(weight, bits, group), random_compensator(outputs, inputs, rank, device)


def random_compensator(outputs: int, inputs: int, rank: int, device: str) -> Compensator:
    """A compensator with random weights: the gate's arguments are of order 1, and so is its correction."""

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*size, device=device)

    return compensator(
        normal(rank, inputs, scale=inputs**-0.5),
        normal(outputs, rank, scale=rank**-0.5),
        normal(4 * rank, rank, scale=rank**-0.5),
        normal(4 * rank),
        normal(rank, 4 * rank, scale=0.5 * rank**-0.5),
        normal(rank),
    )
