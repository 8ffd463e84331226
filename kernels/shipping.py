"""Shared parts of kernels: their shipping, the SHIPPED list of each operation's `triton.py`, and their products' type.

Triton compiles a kernel again for integer arguments that are 1 (as constants) and for multiples of 16. Numbers that
change from step to step are therefore declared `do_not_specialize`: otherwise a server would stop for seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Shipped:
    """One kernel as it is launched on a GPU: types of its arguments, its constants, warps and stages.

    Attributes:
        kernel: made by `triton.jit`.
        types: of the non-constant arguments, in order, in Triton's notation: "*bf16 i32 fp32".
        constants: of the constant arguments, by name.
        aligned: names of integer arguments that are multiples of 16; pointers always are.
        maxnreg: registers of a thread at most, as the compiler is told; None: as it likes.
        least_arch: the lowest compute capability that it supports, such as 80 or 90.
    """

    kernel: Any
    types: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    maxnreg: int | None = None
    least_arch: int = 80

    @property
    def name(self) -> str:
        constants = ", ".join(f"{key}={value}" for key, value in self.constants.items())
        return f"{self.kernel.__name__}[{constants}]"


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type that tensor cores multiply; float32 for bfloat16 under the interpreter, which has no bfloat16."""
    if dtype == torch.bfloat16:
        return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32
