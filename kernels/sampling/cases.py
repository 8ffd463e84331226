"""Benchmark cases of sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from kernels.microbenchmark import Case
from kernels.sampling import SamplingMetadata, SamplingParams, sample
from kernels.shapes import Shape

SAMPLING_KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "all": SamplingParams(seed=1),
    "filtered": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
}
"""Kinds of sampling. The last is the recommendation of Qwen3's model card."""


def cases(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    sequences: Sequence[int],
    kinds: Sequence[str] = tuple(SAMPLING_KINDS),
) -> Iterator[Case]:
    """Each kind of sampling at each number of sequences."""
    for kind in kinds:
        for count in sequences:
            size = count * shape.vocabulary * dtype.itemsize
            yield Case(
                operation=f"sampling/{kind}",
                sizes={"sequences": count, "vocabulary": shape.vocabulary},
                prepare=partial(_prepare, shape, count, device, dtype, SAMPLING_KINDS[kind]),
                moved=size,
                flops=4 * count * shape.vocabulary,
            )


def _prepare(
    shape: Shape, sequences: int, device: str, dtype: torch.dtype, params: SamplingParams
) -> Callable[[], object]:
    logits = 3 * torch.randn(sequences, shape.vocabulary, device=device, dtype=dtype)
    parameters = SamplingMetadata.of([params] * sequences, range(sequences), device)
    return lambda: sample(logits, parameters)
