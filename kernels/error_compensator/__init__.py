"""Products with packed weights, and a small input-dependent term that compensates their rounding errors (SPEAR)."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.error_compensator import reference
from kernels.error_compensator.factors import PARTS, Compensator, compensator, from_int8, to_int8

__all__ = ["PARTS", "Compensator", "compensated_gemm", "compensator", "from_int8", "stage", "to_int8"]

compensated_gemm = dispatched(reference.compensated_gemm)
stage = dispatched(reference.stage)
