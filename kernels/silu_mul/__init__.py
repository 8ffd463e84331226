"""SiLU(gate) · up, the activation between the two projections of a gated feed-forward layer."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.silu_mul import reference

silu_mul = dispatched(reference.silu_mul)
