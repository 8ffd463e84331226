"""Attention of prompt chunks over their paged context."""

from kernels.prefill_attention.reference import prefill_attention

__all__ = ["prefill_attention"]
