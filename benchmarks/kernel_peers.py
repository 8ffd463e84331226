"""Peers of our kernels on the same operands: other projects' kernels, checked first, and chains of calls.

Both packages are optional, compile for the GPU that they find, and are imported here only.

humming-kernels      products with weights of 4 bits, which it reads in GPTQ's layout
flashinfer-python    attention over paged caches, of decodes and of prompts, whose work it plans on the host
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, pad

from kernels.error_compensator import Compensator
from kernels.w4_gemm import PackedWeight, w4_gemm
from kernels.w4_gemm.pack import unpack

HUMMING, FLASHINFER = "humming-kernels", "flashinfer-python"

TOLERANCE = 0.01
"""Root mean square of the difference over that of the result. bfloat16 explains 0.003; codes or pages in any other
order, or a zero point that is off by one, give more than 0.1."""

WORKSPACE_BYTES = 128 << 20
"""FlashInfer's recommendation, for the parts of split sequences."""


class Disagreement(Exception):
    """A peer's result is not ours."""


def check(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises: Disagreement: a peer's result differs from the expected one."""
    difference = result.float() - expected.float()
    error = (difference.square().mean() / expected.float().square().mean()).sqrt().item()
    if not error <= TOLERANCE:  # also where it is no number
        raise Disagreement(f"disagrees by {error:.2g} of the result, allowed {TOLERANCE}")


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    bounds: torch.Tensor,
    contexts: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    """FlashInfer's call for the arguments of `prefill_attention`, at the usual scale; decodes are chunks of one token.

    Raises:
        ImportError: the package is not installed. Other exceptions are its own.
    """
    import flashinfer

    (rows, heads, head_dim), (block_size, kv_heads) = q.shape, keys.shape[1:3]
    lengths = contexts + bounds.diff()
    pages = (lengths + block_size - 1) // block_size
    starts = pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    used = tables[torch.arange(tables.shape[1], device=tables.device) < pages[:, None]]
    work = (starts, used, lengths - (pages - 1) * block_size, heads, kv_heads, head_dim, block_size)
    if rows == len(contexts):
        attention = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "NHD", use_tensor_cores=True)
        attention.plan(*work, q_data_type=q.dtype)
    else:
        attention = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q.device), "NHD")
        attention.plan(bounds, *work, causal=True, q_data_type=q.dtype)
    return functools.partial(attention.run, q, (keys, values))


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """Shared by all calls, none of which runs beside another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def product(weight: PackedWeight) -> Callable[[torch.Tensor], torch.Tensor]:
    """humming's product with one of our weights (4 bits, groups, no zero points); activations are bfloat16.

    Raises:
        ImportError: the package is not installed. Other exceptions are its own.
    """
    from humming.layer import HummingLayer

    assert (weight.bits, weight.zeros) == (4, None), "the form that both have"
    config = {"quant_method": "gptq", "bits": 4, "group_size": weight.group, "sym": True, "desc_act": False}
    layer = HummingLayer(
        shape_n=weight.outputs, shape_k=weight.inputs, weight_config=config, torch_dtype=torch.bfloat16
    ).to(weight.qweight.device)
    scales = weight.scales[: weight.inputs // weight.group, : weight.outputs]
    layer.load_from_tensors({"qweight": gptq_words(weight), "scales": scales.bfloat16()})
    layer.transform()
    return layer


def gptq_words(weight: PackedWeight) -> torch.Tensor:
    """Words of GPTQ's layout, (inputs / 8, outputs) int32: eight inputs a word, the first in the lowest bits."""
    codes = unpack(weight.qweight, weight.bits)[: weight.outputs, : weight.inputs].T
    words = torch.zeros(weight.inputs // 8, weight.outputs, dtype=torch.int32, device=codes.device)
    for place in range(8):
        words |= codes[place::8] << (4 * place)
    return words


@dataclass(frozen=True)
class DenseFactors:
    """A compensator's factors as library calls take them, in the activations' type; α is in `up`."""

    down: torch.Tensor
    up: torch.Tensor
    first: torch.Tensor
    first_bias: torch.Tensor
    second: torch.Tensor
    second_bias: torch.Tensor


def dense_factors(compensator: Compensator, dtype: torch.dtype) -> DenseFactors:
    """The factors unpacked once, before the chain is timed."""
    down = compensator.down.float() * compensator.down_scales.unsqueeze(1)
    up = compensator.alpha * compensator.up.float() * compensator.up_scales.unsqueeze(1)
    parts = (
        down,
        up[: compensator.outputs],
        compensator.first,
        compensator.first_bias,
        compensator.second,
        compensator.second_bias,
    )
    return DenseFactors(*(part.to(dtype).contiguous() for part in parts))


def compensated_chain(x: torch.Tensor, weight: PackedWeight, factors: DenseFactors) -> torch.Tensor:
    """The W4 product and nine more kernels; intermediates are rounded to x's type."""
    y = w4_gemm(x, weight)
    z = linear(x, factors.down)
    inner = linear(z, factors.first, factors.first_bias).relu()
    gate = 1 + torch.tanh(linear(inner, factors.second, factors.second_bias))
    return y + linear(gate * z, factors.up)
