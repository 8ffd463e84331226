"""Cases of every operation run, and count the bytes and operations of their results."""

from __future__ import annotations

import pytest
import torch

from kernels.cases import Cases
from kernels.shapes import Shape

SHAPE = Shape(1, 64, 96, heads=4, kv_heads=2, head_dim=16, vocabulary=30, qk_norm=True)


@pytest.mark.parametrize(
    ("operation", "arguments", "moved", "flops", "size"),
    [
        ("decode_attention", (3, 20), 4 * (2 * 3 * 20 * 2 * 16 + 2 * 3 * 4 * 16), 4 * 3 * 20 * 64, (3, 4, 16)),
        ("prefill_attention", (3, 5, 20), 4 * (2 * 15 * 64 + 2 * 75 * 32), 3 * 115 * 4 * 64, (15, 4, 16)),
        ("prompt_attention", (5,), 4 * (2 * 5 * 64 + 2 * 5 * 32), 15 * 4 * 64, (5, 4, 16)),
        ("rope_kv_write", (3,), 3 * (2 * 8 * 16 * 4 + 16 + 64), 3 * 6 * 16 * 7, (3, 4, 16)),
        ("silu_mul", (3,), 3 * 3 * 96 * 4, 5 * 3 * 96, (3, 96)),
    ],
)
def test_case_runs_and_counts(
    operation: str, arguments: tuple[int, ...], moved: int, flops: int, size: tuple[int, ...], device: str
) -> None:
    case = getattr(Cases(SHAPE, device, torch.float32), operation)(*arguments)
    assert (case.moved, case.flops) == (moved, flops)
    assert case.prepare()().shape == size
