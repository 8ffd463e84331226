"""A point of the grid as a call that can be timed: the call that an engine makes, on random values.

Whole steps are composed of the operations, layer after layer, each with its own weights and caches. The host's overhead
is the time of such a step beyond the sum of its operations. The calibration's end-to-end check compares the sum, with
this overhead, to steps of several kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
Make = Callable[[], Call]

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
    sizes, shape = dict(point.sizes), bench.shape
    cases = Cases(shape, bench.device, bench.dtype, BLOCK)
    if point.operation in LINEAR:
        return _linear(point.operation, sizes["tokens"], *shape.linear()[LINEAR[point.operation]], bench, first)
    if "/" in point.operation:
        return _quantised(point, bench, first)
    if point.operation == "lm_head":
        return _linear("lm_head", sizes["sequences"], shape.vocabulary, shape.hidden, bench, first)
    if point.operation == "embedding":
        return _embedding(sizes["tokens"], bench)
    if point.operation == "mixed_attention":
        return _mixed(point, bench)
    makers: dict[str, Callable[..., Case]] = {
        "layernorm": cases.rms_norm,
        "final_layernorm": cases.rms_norm,
        "rotary_emb": cases.rope_kv_write,
        "act_fn": cases.silu_mul,
        "sampler": lambda sequences: cases.sampling(sequences, "greedy"),
        "decode_attention": lambda batch, context: _decodes(bench, batch, context),
        "prefill_attention": lambda chunk, before: _prompt(bench, chunk, before),
    }
    return replace(makers[point.operation](**sizes), operation=point.operation, sizes=sizes)


def _decodes(bench: Bench, batch: int, context: int) -> Case:
    """Decodes with the block tables of an engine, which pads them on a GPU."""
    padded = (lambda blocks: blocks) if bench.device == "cpu" else padded_width
    return Cases(bench.shape, bench.device, bench.dtype, BLOCK).decode_attention(batch, context, padded)


def _prompt(bench: Bench, chunk: int, before: int) -> Case:
    """One chunk, by what an engine computes it with."""
    cases = Cases(bench.shape, bench.device, bench.dtype, BLOCK)
    if bench.device != "cpu" and bench.dtype != torch.float32 and before == 0 and chunk >= SDPA_TOKENS:
        return cases.prompt_attention(chunk)
    return cases.prefill_attention(1, chunk, before)


def _case(name: str, axis: str, size: int, make: Make, num_bytes: int) -> Case:
    return Case(name, {axis: size}, make, moved=num_bytes, flops=0)


def _linear(name: str, tokens: int, outputs: int, inputs: int, bench: Bench, first: int) -> Case:
    numbers = count(first)

    def make() -> Call:
        x = bench.random(tokens, inputs)
        weight = bench.weights(name, next(numbers), lambda: bench.random(outputs, inputs))
        return lambda: functional.linear(x, weight)

    num_bytes = (outputs * inputs + tokens * (outputs + inputs)) * bench.dtype.itemsize
    return _case(name, "sequences" if name == "lm_head" else "tokens", tokens, make, num_bytes)


def _embedding(tokens: int, bench: Bench) -> Case:
    def make() -> Call:
        table = bench.weights("embedding", 0, lambda: bench.random(bench.shape.vocabulary, bench.shape.hidden))
        ids = torch.randint(bench.shape.vocabulary, (tokens,), device=bench.device)
        return lambda: functional.embedding(ids, table)

    return _case("embedding", "tokens", tokens, make, 2 * tokens * bench.shape.hidden * bench.dtype.itemsize)


def _quantised(point: Point, bench: Bench, first: int) -> Case:
    form, _, kind = point.operation.partition("/")
    outputs, inputs = bench.shape.linear()[kind]
    tokens, numbers = point["tokens"], count(first)

    def make() -> Call:
        weight, compensator = bench.weights(
            f"quantised {kind}", next(numbers), lambda: random_layer(outputs, inputs, RANK, GROUP, bench.device)
        )
        x = bench.random(tokens, inputs)
        return (lambda: w4_gemm(x, weight)) if form == "w4" else (lambda: compensated_gemm(x, weight, compensator))

    num_bytes = outputs * inputs // 2 + tokens * (outputs + inputs) * bench.dtype.itemsize
    return _case(point.operation, "tokens", tokens, make, num_bytes)


def _mixed(point: Point, bench: Bench) -> Case:
    """A chunk of one prompt and decodes: two calls, as an engine makes them."""
    prompt = _prompt(bench, point["chunk"], point["before"])
    decodes = _decodes(bench, point["batch"], point["context"])

    def make() -> Call:
        first, second = prompt.prepare(), decodes.prepare()
        return lambda: (first(), second())

    return Case(
        "mixed_attention",
        dict(point.sizes),
        make,
        moved=prompt.moved + decodes.moved,
        flops=prompt.flops + decodes.flops,
        footprint=prompt.set_bytes + decodes.set_bytes,
    )


def step_case(point: Point, bench: Bench) -> Case:
    def prepare() -> Call:
        operations = _operations(point["chunk"], point["decodes"], point["context"], bench.shape.layers)
        calls = [case_of(operation, bench, layer).prepare() for layer, operation in operations]

        def step() -> None:
            for call in calls:
                call()

        return step

    return Case("whole_step", dict(point.sizes), prepare, moved=0, flops=0, footprint=1 << 40)


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
