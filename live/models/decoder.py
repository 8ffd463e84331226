"""The forward pass of one step: from token ids to hidden states and logits.

The rows of a step are its decodes, one each, then the tokens of its prompt chunks, chunk by chunk. Linear layers
compute all rows together; attention computes decodes and chunks apart.

A layer has two stages, and attention/FFN disaggregation cuts between them (AFD 2). The attention stage has everything
that depends on a request: norms, attention with its KV cache, the residual, and of a mixture of experts the router. The
FFN stage is a function of rows and weights.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn.functional import embedding

from kernels.decode_attention import decode_attention, decode_work
from kernels.expert_gemm import expert_mlp, route
from kernels.prefill_attention import prefill_attention, prompt_attention
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope_kv_write import rope_kv_write, rope_table
from kernels.silu_mul import silu_mul
from live.models.config import ModelConfig
from live.models.linear import linear
from live.models.tensor_parallel import CompensatedRowParallel, StagedProduct
from live.models.weights import FFN, DenseFFN, Experts, Layer, Weights, with_new_counters

Product = torch.Tensor | StagedProduct
"""(n, hidden), or its parts, which the next norm adds up."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of one step as tensors: n rows, of which the first d are decodes, and c chunks.

    Attributes:
        tokens: (n,) int64. positions: (n,) int64, from 0.
        slots: (n,) int64, of each row's key and value (block id · block size + offset), or -1 for a padding row.
        decode_tables: (d, blocks) int32. decode_lengths: (d,) int32, cached tokens including the new one.
        chunk_tables: (c, blocks) int32. chunk_starts: (c + 1,) int32, counted from row d.
        chunk_contexts: (c,) int32, tokens in the cache before the chunk.
        no_context: the only chunk begins its prompt, and PyTorch's attention is to compute it.
        decode_work: of `kernels.decode_attention.decode_work`; None: each layer computes it.
        adapters: (n,) int64, each row's slot of `AdapterSlots`, or -1; None: no slots.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    chunk_tables: torch.Tensor
    chunk_starts: torch.Tensor
    chunk_contexts: torch.Tensor
    no_context: bool = False
    decode_work: object = None
    adapters: torch.Tensor | None = None

    @property
    def decodes(self) -> int:
        return self.decode_lengths.shape[0]

    @property
    def chunks(self) -> int:
        """The number of prompt chunks."""
        return self.chunk_contexts.shape[0]


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers, each (layers, blocks, block size, kv_heads, head_dim)."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def allocate(cls, config: ModelConfig, blocks: int, block_size: int, dtype: torch.dtype, device: str) -> PagedCache:
        """A cache of zeros. Padding rows read blocks that were never written, whose values must be finite."""
        shape = config.shape
        size = (shape.layers, blocks, block_size, shape.kv_heads, shape.head_dim)
        keys, values = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values)


class FFNRows(NamedTuple):
    """The FFN's input (n, hidden), normalised; weights and experts (n, chosen) float32, int32; None if dense."""

    hidden: torch.Tensor
    weights: torch.Tensor | None = None
    experts: torch.Tensor | None = None


class Decoder:
    """A model with its weights.

    `attention_backend`: of steps whose only prompt chunk begins its prompt: "sdpa", PyTorch's attention, or "triton",
    this project's kernel, which computes all others. On an H200 the first takes 0.55 to 0.68 of the other's time.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        fast = weights.norm.is_cuda and weights.norm.dtype != torch.float32
        self.attention_backend = "sdpa" if fast else "triton"
        shape = config.shape
        self._scale = 1 / math.sqrt(shape.head_dim)
        self._cos, self._sin = rope_table(
            shape.head_dim, config.max_position_embeddings, shape.rope_theta, config.scaling, device=weights.norm.device
        )

    def for_another_stream(self) -> Decoder:
        """The same model for a worker on another CUDA stream: it shares everything but the counters of kernels."""
        decoder = copy.copy(self)
        decoder.weights = with_new_counters(self.weights)
        return decoder

    def forward(self, inputs: Inputs, cache: PagedCache) -> torch.Tensor:
        """The last layer's output before the final norm, (n, hidden). Writes the keys and values of the rows."""
        inputs = with_decode_work(inputs, cache)
        hidden: Product = self.embed(inputs)
        residual = None
        for i, layer in enumerate(self.weights.layers):
            rows, residual = self.attention_stage(i, hidden, residual, inputs, cache)
            assert layer.ffn is not None, "a process that computes attention only runs stage by stage"
            hidden = _ffn_product(layer.ffn, rows)
        assert residual is not None
        if isinstance(hidden, StagedProduct):
            return hidden.add_rms_norm(residual, self.weights.norm, self.config.shape.epsilon)[1]
        return hidden + residual

    def embed(self, inputs: Inputs) -> torch.Tensor:
        """The input of the first layer, (n, hidden)."""
        return embedding(inputs.tokens, self.weights.embedding)

    def attention_stage(
        self, index: int, hidden: Product, residual: torch.Tensor | None, inputs: Inputs, cache: PagedCache
    ) -> tuple[FFNRows, torch.Tensor]:
        """A layer's first stage: what its FFN computes with, and the residual that its output is added to.

        `hidden`: (n, hidden), the output of the FFN before, or of `embed`. `residual`: None in the first layer.
        """
        layer, epsilon = self.weights.layers[index], self.config.shape.epsilon
        if residual is None:
            assert isinstance(hidden, torch.Tensor), "the first layer's input is the embedding"
            residual, normed = hidden, rms_norm(hidden, layer.before, epsilon)
        else:
            normed, residual = _add_rms_norm(hidden, residual, layer.before, epsilon)
        attended = self._attention(layer, normed, inputs, cache.keys[index], cache.values[index])
        normed, residual = _add_rms_norm(attended, residual, layer.after, epsilon)
        if layer.router is None:
            return FFNRows(normed), residual
        top_k = self.config.shape.experts_per_token
        return FFNRows(normed, *route(linear(normed, layer.router), top_k, self.config.normalised_routing)), residual

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm of some rows, (rows, hidden)."""
        return rms_norm(hidden, self.weights.norm, self.config.shape.epsilon)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """The logits, (rows, vocabulary), of rows that have passed `normed`."""
        assert self.weights.head is not None
        return linear(normed, self.weights.head)

    def labels(self, normed: torch.Tensor) -> torch.Tensor:
        """The labels' logits, (rows, labels), of rows that have passed `normed`, from a classification model."""
        assert self.weights.score is not None
        return linear(normed, self.weights.score)

    def _attention(
        self, layer: Layer, x: torch.Tensor, inputs: Inputs, keys: torch.Tensor, values: torch.Tensor
    ) -> Product:
        shape, d = self.config.shape, inputs.decodes
        qkv = linear(x, layer.qkv)
        q = rope_kv_write(
            qkv, inputs.positions, inputs.slots, self._cos, self._sin, keys, values,
            q_norm=layer.q_norm, k_norm=layer.k_norm, epsilon=shape.epsilon, keep_keys=inputs.no_context,
        )  # fmt: skip
        q, k = q[:, : shape.heads], q[d:, shape.heads :]
        parts = []
        if d:
            tables, lengths, work = inputs.decode_tables, inputs.decode_lengths, inputs.decode_work
            parts.append(decode_attention(q[:d], keys, values, tables, lengths, self._scale, work=work))
        if inputs.no_context:
            v = qkv.view(len(q), -1, shape.head_dim)[d:, -shape.kv_heads :]
            parts.append(prompt_attention(q[d:], k, v, self._scale))
        elif inputs.chunks:
            parts.append(
                prefill_attention(
                    q[d:], keys, values, inputs.chunk_tables, inputs.chunk_starts, inputs.chunk_contexts, self._scale
                )
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        attended = attended.reshape(x.shape[0], -1)
        return layer.o.stage(attended) if isinstance(layer.o, CompensatedRowParallel) else linear(attended, layer.o)


def with_decode_work(inputs: Inputs, cache: PagedCache) -> Inputs:
    """The inputs with what all layers' decode attention shares, if there is anything."""
    if not (inputs.decodes and inputs.tokens.is_cuda):
        return inputs
    return replace(inputs, decode_work=decode_work(inputs.decode_lengths, inputs.decode_tables, cache.keys[0]))


def _add_rms_norm(
    product: Product, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(product, StagedProduct):
        return product.add_rms_norm(residual, weight, epsilon)
    return add_rms_norm(product, residual, weight, epsilon)


def _ffn_product(ffn: FFN, rows: FFNRows) -> Product:
    """The FFN's product, before it is added to the residual and normalised."""
    if isinstance(ffn, DenseFFN) and isinstance(ffn.down, CompensatedRowParallel):
        return ffn.down.stage(silu_mul(linear(rows.hidden, ffn.gate_up)))
    return ffn_stage(ffn, rows)


def ffn_stage(ffn: FFN, rows: FFNRows) -> torch.Tensor:
    """The second stage of a layer, (n, hidden)."""
    if isinstance(ffn, Experts):
        assert rows.weights is not None
        assert rows.experts is not None
        output = expert_mlp(rows.hidden, rows.weights, rows.experts, ffn.gate_up, ffn.down)
        return output if ffn.group is None else ffn.group.sum(output)
    return linear(silu_mul(linear(rows.hidden, ffn.gate_up)), ffn.down)
