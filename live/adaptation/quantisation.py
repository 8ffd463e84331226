"""A decode module in few bits (QSUN, section 3.3)."""

from __future__ import annotations

import torch

from kernels.w4_gemm import dequantise
from live.adaptation.weights import MATRICES, from_named, to_named
from live.models.config import ModelConfig
from live.models.linear import Rounding
from live.models.weights import Weights


def rounded(config: ModelConfig, weights: Weights, rounding: Rounding) -> Weights:
    """Linear layers rounded to nearest as the live engine rounds them, then unpacked to dense tensors.

    Embedding, head and norms stay as they are (appendix A.1). The values are those that `kernels/w4_gemm` multiplies
    with; dense, they are unpacked once and not in every step of a training.
    """
    named = to_named(weights)
    with torch.no_grad():
        for name, tensor in named.items():
            if name.rpartition(".")[2] in MATRICES:
                named[name] = dequantise(rounding(tensor), tensor.dtype)
    return from_named(config, named)
