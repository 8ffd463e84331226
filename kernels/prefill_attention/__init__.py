"""Attention of chunks of prompts over their paged caches."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.prefill_attention import reference

prefill_attention = dispatched(reference.prefill_attention)
