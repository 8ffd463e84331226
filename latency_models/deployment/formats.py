"""Formats of a model's weights. Embeddings, the output head, routers and norms are in bf16 in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Weights: TypeAlias = Literal["bf16", "fp8", "int8", "fp4", "mxfp4"]

WEIGHT_BYTES: dict[Weights, float] = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5625, "mxfp4": 0.53125}
"""Bytes of one weight. Of the 4-bit formats, NVFP4 has an 8-bit scale for 16 weights and MXFP4 one for 32."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of the linear layers (projections, dense FFNs, shared experts) and of the routed experts."""

    linear: Weights
    experts: Weights

    def __str__(self) -> str:
        return self.linear if self.linear == self.experts else f"{self.linear}, experts in {self.experts}"
