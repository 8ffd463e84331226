"""QK-norm, RoPE and the write to the paged cache, in one."""

from kernels.rope_kv_write.reference import rope_kv_write, rope_table

__all__ = ["rope_kv_write", "rope_table"]
