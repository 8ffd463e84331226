"""Norms queries and keys, rotates them by their positions, and writes keys and values to the paged cache."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.rope_kv_write import reference
from kernels.rope_kv_write.reference import Llama3Scaling, rope_table

__all__ = ["Llama3Scaling", "rope_kv_write", "rope_table"]

rope_kv_write = dispatched(reference.rope_kv_write)
