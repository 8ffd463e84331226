"""The tail of a compensated product that is split over tensor-parallel ranks, up to the next layer's input."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.ec_tail import reference

ec_tail = dispatched(reference.ec_tail, contiguous=3)
