"""The product of humming-kernels with weights of 4 bits: the same codes as ours, checked before it is timed.

The package is optional (`pip install humming-kernels`; it compiles for the GPU that it finds) and is imported here
only. It gets the weight in GPTQ's layout, which is public and which it reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.w4_gemm import PackedWeight, dequantise
from kernels.w4_gemm.pack import unpack

PACKAGE = "humming-kernels"

TOLERANCE = 0.01
"""Root mean square of the difference over that of the product. bfloat16 scales and results explain 0.003; codes in any
other order, or a zero point that is off by one, give more than 0.1."""

Product = Callable[[torch.Tensor], torch.Tensor]


class Disagreement(Exception):
    """The peer's product is not x · Ŵᵀ."""


def product(weight: PackedWeight) -> Product:
    """The peer's product with one of our weights (4 bits, groups, no zero points); activations are bfloat16.

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


def checked_product(weight: PackedWeight, x: torch.Tensor) -> Product:
    """The `product` of the peer, after a check of its result for x, (tokens, inputs).

    Raises:
        ImportError: as `product`. Disagreement: its result was wrong.
    """
    y = product(weight)
    exact = x.float() @ dequantise(weight).T
    error = ((y(x).float() - exact).square().mean() / exact.square().mean()).sqrt().item()
    if not error <= TOLERANCE:  # also where it is no number
        raise Disagreement(f"disagrees with x · Ŵᵀ by {error:.2g} of it, allowed {TOLERANCE}")
    return y


def gptq_words(weight: PackedWeight) -> torch.Tensor:
    """Words of GPTQ's layout, (inputs / 8, outputs) int32: eight inputs a word, the first in the lowest bits."""
    codes = unpack(weight.qweight, weight.bits)[: weight.outputs, : weight.inputs].T
    words = torch.zeros(weight.inputs // 8, weight.outputs, dtype=torch.int32, device=codes.device)
    for place in range(8):
        words |= codes[place::8] << (4 * place)
    return words
