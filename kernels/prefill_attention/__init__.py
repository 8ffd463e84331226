"""Attention of chunks of prompts over their paged caches, and of one whole prompt, which needs no cache."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.dispatch import dispatched
from kernels.prefill_attention import reference

prefill_attention = dispatched(reference.prefill_attention)


def prompt_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Token i attends to tokens 0 to i, by PyTorch's attention: on an H200 cuDNN's.

    Args:
        q: (tokens, heads, head_dim). k, v: (tokens, kv_heads, head_dim). Rows that pad the end change none before.

    Returns:
        (tokens, heads, head_dim).
    """
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)
