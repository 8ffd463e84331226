"""The kernel configurations that ship: what each operation's `triton.py` lists as SHIPPED.

Triton compiles anew for whole numbers that are 1 (as constants) and for multiples of 16. Numbers that change from step
to step are therefore declared `do_not_specialize`: a server would stand still for seconds in the middle of its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shipped:
    """One kernel as it is launched on a GPU: types of its arguments, its constants, warps and stages.

    Attributes:
        kernel: what `triton.jit` made.
        types: of the arguments that are no constants, in order, as Triton writes them: "*bf16 i32 fp32".
        constants: of the constant arguments, by name.
        aligned: arguments known to be multiples of 16, by name; pointers are by themselves.
        least_arch: the first compute capability it is meant for, as 80 or 90.
    """

    kernel: Any
    types: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    least_arch: int = 80

    @property
    def name(self) -> str:
        """The kernel with its constants, for people."""
        constants = ", ".join(f"{key}={value}" for key, value in self.constants.items())
        return f"{self.kernel.__name__}[{constants}]"
