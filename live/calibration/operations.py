"""A point of the grid as a call that can be timed: the call that an engine makes, on random values.

Whole steps are composed of the operations, layer after layer, each with its own weights and caches. The host's overhead
is the time of such a step beyond the sum of its operations. The calibration's end-to-end check compares the sum, with
this overhead, to steps of several kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.nn import functional

from kernels.cases import Cases, random_layer
from kernels.error_compensator import compensated_gemm
from kernels.microbenchmark import Case
from kernels.shapes import Shape
from kernels.w4_gemm import w4_gemm
from kernels.w4_gemm.pack import GROUP
from latency_models.deployment.models import DenseFFN, GroupedQueryAttention, Model
from live.graphs.capture_sizes import SDPA_TOKENS, padded_width
from workloads.errors import BadInput

LINEAR = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}
"""The layer type of each linear operation in kernel tables."""

ROW_BY_ROW = (*LINEAR, "layernorm", "rotary_emb", "act_fn", "embedding", "final_layernorm")
HEAD = ("lm_head", "sampler")
QUANTISED = tuple(f"{form}/{kind}" for form in ("w4", "ec") for kind in LINEAR.values())

BLOCK = 16
"""Block size of the KV cache, tokens."""

BEFORE_ATTENTION = ("layernorm", "qkv_proj", "rotary_emb")
AFTER_ATTENTION = ("o_proj", "layernorm", "gate_up_proj", "act_fn", "down_proj")


@dataclass(frozen=True)
class Point:
    """One measurement: an operation and its sizes, in order; a `held_out` point only judges tables and lines."""

    operation: str
    sizes: tuple[tuple[str, int], ...]
    held_out: bool = False

    @property
    def key(self) -> str:
        """The point's name in the journal."""
        return " ".join([self.operation, *(f"{name}={value}" for name, value in self.sizes)])

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]


Call = Callable[[], object]

RANK = 28
"""Rank of an error compensator: SPEAR's for Llama-2-7B (table 8)."""


def shape_of(model: Model, epsilon: float = 1e-5) -> Shape:
    """The shapes that kernels are called with."""
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
    """The implementation: "triton" or "reference" for this project's kernels, "torch" for a library's product."""
    if operation in (*LINEAR, "lm_head", "embedding"):
        return "torch"
    return "triton" if device == "cuda" else "reference"


def missing(operation: str, shape: Shape) -> str:
    """The reason why an operation cannot be measured; "" if it can."""
    form, _, kind = operation.partition("/")
    if form not in ("w4", "ec"):
        return ""
    inputs = shape.linear()[kind][1]
    return f"its {inputs} inputs are no whole groups of {GROUP}" if inputs % GROUP else ""


@dataclass(frozen=True)
class Bench:
    """The parts that all points share. Weights are made once, since making them takes longer than measuring."""

    shape: Shape
    device: str
    dtype: torch.dtype
    _weights: dict[str, list[Any]] = field(default_factory=dict)

    def weights(self, name: str, number: int, make: Callable[[], Any]) -> Any:
        """The weights of this name and number, made if they do not exist."""
        weights = self._weights.setdefault(name, [])
        while len(weights) <= number:
            weights.append(make())
        return weights[number]

    def random(self, *size: int) -> torch.Tensor:
        """Random values of variance 1."""
        return torch.randn(size, device=self.device, dtype=self.dtype)


def case_of(point: Point, bench: Bench, first: int = 0) -> Case:
    """The case of a point, for `kernels.microbenchmark.measure`; linear layers are numbered from `first`."""
    shape = bench.shape
    cases = Cases(shape, bench.device, bench.dtype, BLOCK)
    form, _, kind = point.operation.partition("/")
    linear = {name: shape.linear()[layer] for name, layer in LINEAR.items()}
    linear["lm_head"] = (shape.vocabulary, shape.hidden)
    makers: dict[str, Callable[..., Case]] = {
        **{name: partial(_linear, bench, name, first, *size) for name, size in linear.items()},
        **dict.fromkeys(("w4", "ec"), partial(_quantised, bench, form, kind, first)),
        "embedding": partial(_embedding, bench),
        "layernorm": cases.rms_norm,
        "final_layernorm": cases.rms_norm,
        "rotary_emb": cases.rope_kv_write,
        "act_fn": cases.silu_mul,
        "sampler": lambda sequences: cases.sampling(sequences, "greedy"),
        "decode_attention": partial(_decodes, cases),
        "prefill_attention": partial(_prompt, cases),
        "mixed_attention": partial(_mixed, cases),
        "whole_step": partial(_step, bench),
    }
    sizes = dict(point.sizes)
    return replace(makers[form](*sizes.values()), operation=point.operation, sizes=sizes)


def _decodes(cases: Cases, batch: int, context: int) -> Case:
    """Decodes with the block tables of an engine, which pads them on a GPU."""
    return cases.decode_attention(batch, context, (lambda blocks: blocks) if cases.device == "cpu" else padded_width)


def _prompt(cases: Cases, chunk: int, before: int) -> Case:
    """One chunk, by what an engine computes it with."""
    if cases.device != "cpu" and cases.dtype != torch.float32 and before == 0 and chunk >= SDPA_TOKENS:
        return cases.prompt_attention(chunk)
    return cases.prefill_attention(1, chunk, before)


def _mixed(cases: Cases, chunk: int, before: int, batch: int, context: int) -> Case:
    """A chunk of one prompt and decodes: two calls, as an engine makes them."""
    prompt, decodes = _prompt(cases, chunk, before), _decodes(cases, batch, context)

    def make() -> Call:
        first, second = prompt.prepare(), decodes.prepare()
        return lambda: (first(), second())

    moved, flops = prompt.moved + decodes.moved, prompt.flops + decodes.flops
    return Case("", {}, make, moved, flops, footprint=prompt.set_bytes + decodes.set_bytes)


def _linear(bench: Bench, name: str, first: int, outputs: int, inputs: int, tokens: int) -> Case:
    numbers = count(first)

    def make() -> Call:
        x = bench.random(tokens, inputs)
        weight = bench.weights(name, next(numbers), lambda: bench.random(outputs, inputs))
        return lambda: functional.linear(x, weight)

    return Case("", {}, make, (outputs * inputs + tokens * (outputs + inputs)) * bench.dtype.itemsize, flops=0)


def _embedding(bench: Bench, tokens: int) -> Case:
    def make() -> Call:
        table = bench.weights("embedding", 0, lambda: bench.random(bench.shape.vocabulary, bench.shape.hidden))
        ids = torch.randint(bench.shape.vocabulary, (tokens,), device=bench.device)
        return lambda: functional.embedding(ids, table)

    return Case("", {}, make, moved=2 * tokens * bench.shape.hidden * bench.dtype.itemsize, flops=0)


def _quantised(bench: Bench, form: str, kind: str, first: int, tokens: int) -> Case:
    (outputs, inputs), numbers = bench.shape.linear()[kind], count(first)

    def make() -> Call:
        weight, compensator = bench.weights(
            f"quantised {kind}", next(numbers), lambda: random_layer(outputs, inputs, RANK, GROUP, bench.device)
        )
        x = bench.random(tokens, inputs)
        return (lambda: w4_gemm(x, weight)) if form == "w4" else (lambda: compensated_gemm(x, weight, compensator))

    return Case("", {}, make, outputs * inputs // 2 + tokens * (outputs + inputs) * bench.dtype.itemsize, flops=0)


def _step(bench: Bench, chunk: int, decodes: int, context: int) -> Case:
    """A whole step, so large that nothing of it is in a cache."""

    def make() -> Call:
        operations = _operations(chunk, decodes, context, bench.shape.layers)
        calls = [case_of(operation, bench, layer).prepare() for layer, operation in operations]
        return lambda: [call() for call in calls]

    return Case("", {}, make, moved=0, flops=0, footprint=1 << 40)


def _operations(chunk: int, decodes: int, context: int, layers: int) -> Iterator[tuple[int, Point]]:
    rows, sequences = (("tokens", chunk + decodes),), (("sequences", decodes + bool(chunk)),)
    prompt = (("chunk", chunk), ("before", 0)) if chunk else ()
    decoding = (("batch", decodes), ("context", context)) if decodes else ()
    name = "mixed_attention" if chunk and decodes else "prefill_attention" if chunk else "decode_attention"
    yield 0, Point("embedding", rows)
    for layer in range(layers):
        yield from ((layer, Point(operation, rows)) for operation in BEFORE_ATTENTION)
        yield layer, Point(name, prompt + decoding)
        yield from ((layer, Point(operation, rows)) for operation in AFTER_ATTENTION)
    yield 0, Point("final_layernorm", rows)
    yield 0, Point("lm_head", sequences)
    yield 0, Point("sampler", sequences)
