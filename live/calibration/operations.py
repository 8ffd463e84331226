"""A point of the grid as something that can be timed: the call that an engine makes, on random values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch.nn import functional

from kernels.microbenchmark import Case
from kernels.rms_norm import add_rms_norm
from kernels.sampling import Parameters, Wish, sample
from kernels.shapes import Shape
from kernels.silu_mul import silu_mul
from latency_models.models import DenseFFN, GroupedQueryAttention, Model
from live.calibration import attention
from live.calibration.grid import LINEAR, Point
from workloads.errors import BadInput

Call = Callable[[], object]
Make = Callable[[], Call]

RANK = 28
"""Of an error compensator: SPEAR's for Llama-2-7B (table 8)."""


def shape_of(model: Model, epsilon: float = 1e-5) -> Shape:
    """The shapes that kernels are called with.

    Raises:
        BadInput: a model that is not dense with grouped queries.
    """
    heads, ffn = model.attention, model.ffn
    if not isinstance(heads, GroupedQueryAttention) or not isinstance(ffn, DenseFFN):
        raise BadInput("expected a dense model with grouped queries", field="model", value=model.name)
    return Shape(
        layers=model.layers,
        hidden=model.hidden_size,
        intermediate=ffn.intermediate_size,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        vocabulary=model.vocabulary,
        qk_norm=heads.qk_norm,
        epsilon=epsilon,
    )


def via(operation: str, device: str) -> str:
    """What runs: "triton" or "reference" of this project's kernels, or "torch" where it has none."""
    own = "triton" if device == "cuda" else "reference"
    if operation in (*LINEAR, "lm_head", "embedding", "rotary_emb", "prefill_attention"):
        return "torch"
    if operation == "mixed_attention":
        return f"{via('decode_attention', device)} and torch"
    if operation == "decode_attention" and not attention.has("decode_attention"):
        return "torch"
    return own


def missing(operation: str, shape: Shape) -> str:
    """Why an operation cannot be measured; "" if it can."""
    form, _, kind = operation.partition("/")
    folder = {"w4": "w4_gemm", "ec": "error_compensator"}.get(form, "")
    if not folder:
        return ""
    if not attention.has(folder):
        return f"kernels/{folder} is not there"
    from kernels.w4_gemm.pack import GROUP

    inputs = shape.linear()[kind][1]
    return f"its {inputs} inputs are no whole groups of {GROUP}" if inputs % GROUP else ""


class Pool:
    """Weights that were made once and serve every point: making them takes longer than measuring with them."""

    def __init__(self) -> None:
        self._made: dict[str, list[Any]] = {}

    def take(self, name: str, number: int, make: Callable[[], Any]) -> Any:
        """The weights of this name and number, made if they are not there."""
        made = self._made.setdefault(name, [])
        while len(made) <= number:
            made.append(make())
        return made[number]


@dataclass(frozen=True)
class Bench:
    """What all points have in common."""

    shape: Shape
    device: str
    dtype: torch.dtype
    pool: Pool = field(default_factory=Pool)

    def random(self, *size: int) -> torch.Tensor:
        """Values of variance 1."""
        return torch.randn(size, device=self.device, dtype=self.dtype)


def case_of(point: Point, bench: Bench, first: int = 0) -> Case:
    """What `kernels.microbenchmark.measure` times for a point; bytes are those that one set of inputs takes.

    Sets of inputs have weights numbered from `first`.
    """
    if point.operation in LINEAR or point.operation in _ROWS:
        make, size = _row_by_row(point.operation, point["tokens"], bench, first)
    elif point.operation in ("lm_head", "sampler"):
        make, size = _head(point.operation, point["sequences"], bench, first)
    elif "/" in point.operation:
        make, size = _quantised(point, bench, first)
    else:
        make, size = _attention(point, bench)
    return Case(point.operation, dict(point.sizes), make, moved=size, flops=0, set_bytes=size)


_ROWS = ("layernorm", "final_layernorm", "rotary_emb", "act_fn", "embedding")


def _row_by_row(name: str, tokens: int, bench: Bench, first: int) -> tuple[Make, int]:
    shape = bench.shape
    if name in LINEAR:
        return _linear(name, tokens, *shape.linear()[LINEAR[name]], bench, first)
    makers: dict[str, tuple[Callable[[int, Bench], Call], int]] = {
        "layernorm": (_norm, 4 * shape.hidden),
        "final_layernorm": (_norm, 4 * shape.hidden),
        "rotary_emb": (_rotary, 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        "act_fn": (_activation, 3 * shape.intermediate),
        "embedding": (_embedding, 2 * shape.hidden),
    }
    make, elements = makers[name]
    return lambda: make(tokens, bench), tokens * elements * bench.dtype.itemsize


def _linear(name: str, tokens: int, outputs: int, inputs: int, bench: Bench, first: int) -> tuple[Make, int]:
    numbers = count(first)

    def make() -> Call:
        x = bench.random(tokens, inputs)
        weight = bench.pool.take(name, next(numbers), lambda: bench.random(outputs, inputs))
        return lambda: functional.linear(x, weight)

    return make, (outputs * inputs + tokens * (outputs + inputs)) * bench.dtype.itemsize


def _norm(tokens: int, bench: Bench) -> Call:
    x, residual = (bench.random(tokens, bench.shape.hidden) for _ in range(2))
    weight = torch.ones(bench.shape.hidden, device=bench.device, dtype=bench.dtype)
    return lambda: add_rms_norm(x, residual, weight, bench.shape.epsilon)


def _activation(tokens: int, bench: Bench) -> Call:
    packed = bench.random(tokens, 2 * bench.shape.intermediate)
    return lambda: silu_mul(packed)


def _embedding(tokens: int, bench: Bench) -> Call:
    table = bench.pool.take("embedding", 0, lambda: bench.random(bench.shape.vocabulary, bench.shape.hidden))
    ids = torch.randint(bench.shape.vocabulary, (tokens,), device=bench.device)
    return lambda: functional.embedding(ids, table)


def _rotary(tokens: int, bench: Bench) -> Call:
    """Queries and keys turned, keys and values written into pages."""
    shape = bench.shape
    qkv = bench.random(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    angle = bench.random(tokens, 1, shape.head_dim // 2)
    cos, sin = angle.cos(), angle.sin()
    k_cache, v_cache = (bench.random(tokens + attention.BLOCK, shape.kv_heads, shape.head_dim) for _ in range(2))
    slots = torch.randperm(len(k_cache), device=bench.device)[:tokens]

    def call() -> object:
        turned, v = qkv.split((shape.heads + shape.kv_heads, shape.kv_heads), dim=1)
        low, high = turned.chunk(2, dim=-1)
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        q, k = turned.split((shape.heads, shape.kv_heads), dim=1)
        k_cache.index_copy_(0, slots, k)
        v_cache.index_copy_(0, slots, v)
        return q

    return call


def _head(name: str, sequences: int, bench: Bench, first: int) -> tuple[Make, int]:
    shape = bench.shape
    if name == "lm_head":
        return _linear(name, sequences, shape.vocabulary, shape.hidden, bench, first)

    def make() -> Call:
        logits = 3 * bench.random(sequences, shape.vocabulary)
        parameters = Parameters.of([Wish(seed=row) for row in range(sequences)], range(sequences), bench.device)
        return lambda: sample(logits, parameters)

    return make, sequences * shape.vocabulary * bench.dtype.itemsize


def _quantised(point: Point, bench: Bench, first: int) -> tuple[Make, int]:
    form, _, kind = point.operation.partition("/")
    outputs, inputs = bench.shape.linear()[kind]
    tokens, numbers = point["tokens"], count(first)

    def make() -> Call:
        from kernels.error_compensator import compensated_gemm
        from kernels.error_compensator.cases import random_layer
        from kernels.w4_gemm import w4_gemm
        from kernels.w4_gemm.pack import GROUP

        weight, compensator = bench.pool.take(
            f"quantised {kind}", next(numbers), lambda: random_layer(outputs, inputs, RANK, GROUP, bench.device)
        )
        x = bench.random(tokens, inputs)
        return (lambda: w4_gemm(x, weight)) if form == "w4" else (lambda: compensated_gemm(x, weight, compensator))

    return make, outputs * inputs // 2 + tokens * (outputs + inputs) * bench.dtype.itemsize


def _attention(point: Point, bench: Bench) -> tuple[Make, int]:
    sizes, shape = dict(point.sizes), bench.shape
    chunk, before, batch, context = (sizes.get(name, 0) for name in ("chunk", "before", "batch", "context"))

    def make() -> Call:
        parts = []
        if chunk:
            parts.append(attention.prompt(shape, chunk, before, bench.device, bench.dtype))
        if batch:
            parts.append(attention.decode(shape, batch, context, bench.device, bench.dtype))
        return parts[0] if len(parts) == 1 else lambda: [part() for part in parts]

    cached = 2 * shape.kv_heads * (batch * context + (chunk and before + chunk))
    return make, (cached + 2 * shape.heads * (batch + chunk)) * shape.head_dim * bench.dtype.itemsize
