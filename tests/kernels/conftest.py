"""Kernels are tested natively where there is a GPU, under Triton's interpreter where there is none.

The interpreter must be asked for before any kernel is defined. On a GPU `KERNEL_DEVICE` is cuda.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="the kernels need the extra [live]")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> str:
    """The device of the tests' tensors."""
    return DEVICE


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is full of NaN (or of the largest integer), so that what a kernel forgets to write shows."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poison(getattr(torch, name)))


def _poison(allocate):  # type: ignore[no-untyped-def]
    def allocated(*args, **kwargs):  # type: ignore[no-untyped-def]
        fresh = allocate(*args, **kwargs)
        return fresh.fill_(float("nan") if fresh.is_floating_point() else torch.iinfo(fresh.dtype).max)

    return allocated
