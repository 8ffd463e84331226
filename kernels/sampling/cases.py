"""What can be measured of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from kernels.microbenchmark import Case
from kernels.sampling import Parameters, Wish, sample
from kernels.shapes import Shape

WISHES = {
    "greedy": Wish(temperature=0.0),
    "all": Wish(seed=1),
    "filtered": Wish(temperature=0.6, top_k=20, top_p=0.95, seed=1),
}
"""Kinds of sampling; the last is what Qwen3's model card advises."""


def cases(
    shape: Shape, device: str, dtype: torch.dtype, sequences: Sequence[int], kinds: Sequence[str] = tuple(WISHES)
) -> Iterator[Case]:
    """Each kind of sampling at each number of sequences."""
    for kind in kinds:
        for count in sequences:
            size = count * shape.vocabulary * dtype.itemsize
            yield Case(
                operation=f"sampling/{kind}",
                sizes={"sequences": count, "vocabulary": shape.vocabulary},
                prepare=_prepare(shape, count, device, dtype, WISHES[kind]),
                moved=size,
                flops=4 * count * shape.vocabulary,
                set_bytes=size,
            )


def _prepare(
    shape: Shape, sequences: int, device: str, dtype: torch.dtype, wish: Wish
) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        logits = 3 * torch.randn(sequences, shape.vocabulary, device=device, dtype=dtype)
        parameters = Parameters.of([wish] * sequences, range(sequences), device)
        return lambda: sample(logits, parameters)

    return prepare
