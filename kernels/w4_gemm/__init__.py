"""Products with weights of 3 or 4 bits."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.w4_gemm import reference
from kernels.w4_gemm.pack import PackedWeight, dequantise, from_codes, part, quantise

__all__ = ["PackedWeight", "dequantise", "from_codes", "part", "quantise", "w4_gemm"]

w4_gemm = dispatched(reference.w4_gemm)
