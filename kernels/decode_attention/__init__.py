"""Attention of one new token of each sequence over its paged cache, also with keys and values as one latent vector."""

from __future__ import annotations

from kernels.decode_attention import reference
from kernels.dispatch import dispatched

decode_attention = dispatched(reference.decode_attention)
decode_work = dispatched(reference.decode_work)
latent_decode_attention = dispatched(reference.latent_decode_attention)
