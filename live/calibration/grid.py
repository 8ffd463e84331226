"""The points that a calibration measures, and those of them that are held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

LINEAR = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}
"""The layer type of each linear operation in kernel tables."""

ROW_BY_ROW = (*LINEAR, "layernorm", "rotary_emb", "act_fn", "embedding", "final_layernorm")
HEAD = ("lm_head", "sampler")
QUANTISED = tuple(f"{form}/{kind}" for form in ("w4", "ec") for kind in LINEAR.values())

GROUPS = ("layers", "attention", "head", "quantised", "communication", "overhead")
"""The choices of `--ops`."""


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


@dataclass(frozen=True)
class Grid:
    """The sizes of a calibration, and held-out points of the same kinds.

    `decodes`: (batch sizes, contexts). `prompts`: (chunks, cached tokens before them); `mixed`: with decodes. `steps`:
    (prompt tokens, decodes, context). `budget`: seconds of a point in a round. `statistic` of its rounds: the `median`,
    or the `least` on a shared machine, where other programs can only lengthen a round.
    """

    tokens: Sequence[int]
    held_tokens: Sequence[int]
    decodes: tuple[Sequence[int], Sequence[int]]
    held_decodes: Sequence[tuple[int, int]]
    prompts: tuple[Sequence[int], Sequence[int]]
    held_prompts: Sequence[tuple[int, int]]
    mixed: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
    held_mixed: Sequence[tuple[int, int, int, int]]
    sequences: Sequence[int]
    held_sequences: Sequence[int]
    quantised: Sequence[int]
    held_quantised: Sequence[int]
    requests: Sequence[int]
    held_requests: Sequence[int]
    steps: Sequence[tuple[int, int, int]]
    rounds: int
    budget: float
    statistic: Literal["median", "least"]

    def points(self, groups: Sequence[str]) -> list[Point]:
        points: list[Point] = []
        if "layers" in groups:
            points += line(ROW_BY_ROW, "tokens", self.tokens, self.held_tokens)
        if "attention" in groups:
            points += _box("decode_attention", ("batch", "context"), self.decodes, self.held_decodes)
            points += _box("prefill_attention", ("chunk", "before"), self.prompts, self.held_prompts)
            points += _box("mixed_attention", ("chunk", "before", "batch", "context"), self.mixed, self.held_mixed)
        if "head" in groups:
            points += line(HEAD, "sequences", self.sequences, self.held_sequences)
        if "quantised" in groups:
            points += line(QUANTISED, "tokens", self.quantised, self.held_quantised)
        return points


def line(names: Sequence[str], axis: str, sizes: Sequence[int], held_out: Sequence[int]) -> Iterator[Point]:
    """Points of operations with one axis."""
    for name in names:
        yield from (Point(name, ((axis, size),)) for size in sizes)
        yield from (Point(name, ((axis, size),), held_out=True) for size in held_out)


def _box(
    name: str, axes: Sequence[str], sizes: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]]
) -> Iterator[Point]:
    yield from (Point(name, tuple(zip(axes, point, strict=True))) for point in product(*sizes))
    yield from (Point(name, tuple(zip(axes, point, strict=True)), held_out=True) for point in held_out)


CPU = Grid(
    tokens=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512),
    held_tokens=(5, 10, 20, 48, 96, 192, 384),
    decodes=((1, 2, 4, 8, 16, 32), (16, 64, 256, 512, 1024)),
    held_decodes=((1, 128), (3, 64), (6, 256), (12, 384), (24, 512), (4, 768), (2, 32)),
    prompts=((16, 32, 64, 128, 192, 256, 384, 512), (0, 128, 256, 512, 1024)),
    held_prompts=((48, 0), (96, 0), (160, 0), (320, 0), (448, 0), (64, 384), (128, 768), (96, 192)),
    mixed=((16, 64, 192, 512), (0, 512), (1, 8, 32), (64, 512)),
    held_mixed=((32, 0, 4, 256), (128, 256, 16, 64), (256, 0, 8, 256), (96, 256, 4, 128), (384, 0, 16, 64)),
    sequences=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64),
    held_sequences=(5, 10, 20, 28, 48),
    quantised=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    held_quantised=(12, 48, 96, 192, 384),
    requests=(1, 4, 16, 64, 256, 1024, 4096),
    held_requests=(32, 512, 2048),
    steps=(
        *((0, 1, 64), (0, 4, 512), (0, 8, 256), (0, 16, 128), (0, 32, 64), (0, 32, 256)),
        *((32, 0, 0), (64, 0, 0), (256, 0, 0), (512, 0, 0), (64, 4, 256), (128, 8, 512)),
    ),
    rounds=4,
    budget=0.015,
    statistic="least",
)
"""Measures a small model in less than three minutes on two cores."""

CUDA = Grid(
    tokens=(*range(1, 17), *range(24, 129, 8), *range(160, 513, 32), 640, 768, 1024, 1536, 2048, 4096, 8192),
    held_tokens=(20, 44, 100, 200, 400, 900, 1280, 3072, 6144),
    decodes=((1, 2, 4, 8, 16, 32, 64, 128, 256), (128, 512, 1024, 2048, 4096, 8192)),
    held_decodes=((1, 3072), (3, 1024), (6, 2048), (12, 768), (24, 1536), (48, 4096), (96, 1024), (192, 512)),
    prompts=((16, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (0, 512, 2048, 8192)),
    held_prompts=((96, 0), (384, 0), (768, 0), (1536, 0), (3072, 0), (256, 1024), (1024, 4096)),
    mixed=((16, 128, 512, 2048), (0, 2048), (1, 8, 32, 128), (256, 1024, 4096)),
    held_mixed=((64, 0, 16, 512), (256, 1024, 64, 1024), (1024, 0, 4, 2048)),
    sequences=(*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256),
    held_sequences=(20, 40, 80, 160, 224),
    quantised=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    held_quantised=(3, 12, 48, 96, 192, 768, 3072),
    requests=(1, 4, 16, 64, 256, 1024, 4096),
    held_requests=(32, 512, 2048),
    steps=((0, 1, 512), (0, 8, 1024), (0, 64, 1024), (512, 0, 0), (2048, 0, 0), (512, 32, 1024)),
    rounds=3,
    budget=0.1,
    statistic="median",
)

COARSE = Grid(
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    held_tokens=(6, 48, 384, 3072),
    decodes=((1, 8, 32, 64, 128), (128, 512, 1024, 4096)),
    held_decodes=((4, 256), (16, 1024), (48, 2048)),
    prompts=((64, 256, 512, 1024, 2048, 4096), (0, 2048)),
    held_prompts=((384, 0), (1536, 0), (256, 1024)),
    mixed=((128, 512, 2048), (0,), (8, 64), (512, 2048)),
    held_mixed=((256, 0, 16, 1024),),
    sequences=(1, 2, 4, 8, 16, 32, 64, 128),
    held_sequences=(6, 48),
    quantised=(1, 4, 16, 64, 256, 1024, 4096),
    held_quantised=(32, 512),
    requests=(1, 64, 1024),
    held_requests=(512,),
    steps=((0, 1, 512), (0, 64, 1024), (512, 0, 0), (512, 32, 1024)),
    rounds=1,
    budget=0.1,
    statistic="median",
)
"""The most important points once: three minutes of a GPU."""

QUICK = Grid(
    tokens=(1, 8, 32, 64),
    held_tokens=(16,),
    decodes=((1, 4), (16, 64, 128)),
    held_decodes=((2, 64),),
    prompts=((16, 32, 64), (0, 64)),
    held_prompts=((48, 0),),
    mixed=((16, 64), (0, 64), (1, 4), (16, 64)),
    held_mixed=(),
    sequences=(1, 4, 8),
    held_sequences=(6,),
    quantised=(1, 16, 64),
    held_quantised=(32,),
    requests=(1, 64, 256),
    held_requests=(128,),
    steps=((0, 1, 64), (0, 4, 64), (32, 0, 0)),
    rounds=2,
    budget=0.005,
    statistic="least",
)
"""A smoke test, with too few points for a usable calibration."""
