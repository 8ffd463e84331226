"""Gathers blocks of a cache into one contiguous buffer, and scatters them back."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.kv_blocks import reference

gather_blocks = dispatched(reference.gather_blocks, contiguous=0)
scatter_blocks = dispatched(reference.scatter_blocks, contiguous=0)
