"""Whole steps composed of the operations, layer after layer, each with its own weights and caches.

The host's overhead is the time of such a step beyond the sum of its operations. The calibration's end-to-end check
compares the sum, with this overhead, to steps of several kinds.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels.microbenchmark import Case
from live.calibration.grid import Point
from live.calibration.operations import Bench, Call, case_of

BEFORE = ("layernorm", "qkv_proj", "rotary_emb")
AFTER = ("o_proj", "layernorm", "gate_up_proj", "act_fn", "down_proj")


def step_point(chunk: int, decodes: int, context: int) -> Point:
    """A fresh prompt of `chunk` tokens, beside `decodes` with a context of `context` tokens each."""
    return Point("whole_step", (("chunk", chunk), ("decodes", decodes), ("context", context)), held_out=True)


def step_case(point: Point, bench: Bench) -> Case:
    """The step as one call."""

    def prepare() -> Call:
        operations = _operations(point["chunk"], point["decodes"], point["context"], bench.shape.layers)
        calls = [case_of(each, bench, layer).prepare() for layer, each in operations]

        def step() -> None:
            for call in calls:
                call()

        return step

    return Case("whole_step", dict(point.sizes), prepare, moved=0, flops=0, set_bytes=1 << 40)


def _operations(chunk: int, decodes: int, context: int, layers: int) -> Iterator[tuple[int, Point]]:
    """(layer, operation) in the order of a step."""
    rows, sequences = (("tokens", chunk + decodes),), (("sequences", decodes + bool(chunk)),)
    prompt = (("chunk", chunk), ("before", 0)) if chunk else ()
    decoding = (("batch", decodes), ("context", context)) if decodes else ()
    name = "mixed_attention" if chunk and decodes else "prefill_attention" if chunk else "decode_attention"
    yield 0, Point("embedding", rows)
    for layer in range(layers):
        yield from ((layer, Point(each, rows)) for each in BEFORE)
        yield layer, Point(name, prompt + decoding)
        yield from ((layer, Point(each, rows)) for each in AFTER)
    yield 0, Point("final_layernorm", rows)
    yield 0, Point("lm_head", sequences)
    yield 0, Point("sampler", sequences)
