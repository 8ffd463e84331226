"""Chooses between an operation's reference and its Triton kernel by the device of its first argument."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def dispatched(
    reference: Callable[Concatenate[torch.Tensor, P], T], *, contiguous: int = 1
) -> Callable[Concatenate[torch.Tensor, P], T]:
    """The operation that `reference` defines: on CUDA the function of the same name in `triton.py` beside it.

    Args:
        reference: a function of an operation's `reference.py`.
        contiguous: how many arguments, from the first on, the kernel needs as contiguous tensors.
    """
    package = reference.__module__.rpartition(".")[0]
    name = reference.__name__

    @functools.wraps(reference)
    def operation(first: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not first.is_cuda:
            return reference(first, *args, **kwargs)
        tensors: list[Any] = [first, *args]
        tensors[:contiguous] = [tensor.contiguous() for tensor in tensors[:contiguous]]
        kernel: Callable[..., T] = getattr(importlib.import_module(f"{package}.triton"), name)
        return kernel(*tensors, **kwargs)

    operation.__module__ = package
    return operation
