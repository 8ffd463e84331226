"""Instructions that turn packed codes into numbers of bfloat16 or float16, for Triton's inline assembly."""

from __future__ import annotations

import torch
import triton.language as tl


def _pair(value: float, dtype: torch.dtype) -> str:
    """A number twice in a word, in hexadecimal."""
    bits = int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF
    return f"{bits << 16 | bits:#x}"


def codes_ptx(bits: int, dtype: torch.dtype) -> tl.constexpr:
    """PTX for a word with two codes: as two numbers of a type, less 2^(bits − 1).

    A code in the lowest bits of a number whose exponent is set makes the number 128 + code (1,024 + code in float16).
    Mask and exponent are one instruction, which ptxas does not make of two constants, and so is the subtraction of both
    halves. Of 3 bits, the two low ones are in the first word and the high one is in the second.
    """
    kind, base = ("bf16x2", 128.0) if dtype == torch.bfloat16 else ("f16x2", 1024.0)
    exponent, one, less = (_pair(value, dtype) for value in (base, 1.0, -base - 2.0 ** (bits - 1)))
    parts = f"lop3.b32 t, $2, 0x000F000F, {exponent}, 0xEA;"
    if bits == 3:
        parts = f"lop3.b32 t, $3, 0x00040004, {exponent}, 0xEA; lop3.b32 t, $2, 0x00030003, t, 0xEA;"
    subtraction = f"mov.b32 o, {one}; mov.b32 l, {less}; fma.rn.{kind} t, t, o, l;"
    return tl.constexpr(f"{{ .reg .b32 t, o, l; {parts} {subtraction} mov.b32 {{$0, $1}}, t; }}")


BF16_FOUR, BF16_THREE = (codes_ptx(bits, torch.bfloat16) for bits in (4, 3))
FP16_FOUR, FP16_THREE = (codes_ptx(bits, torch.float16) for bits in (4, 3))
