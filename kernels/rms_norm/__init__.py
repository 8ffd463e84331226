"""RMSNorm, with the residual added first if there is one."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.rms_norm import reference

rms_norm = dispatched(reference.rms_norm)
add_rms_norm = dispatched(reference.add_rms_norm, contiguous=2)
