"""The parts of an error compensator: INT8 factors with one scale a row, and the gate's two small layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.w4_gemm.pack import ROWS

PARTS = {
    "down": (torch.int8, ("rank", "inputs")),
    "down_scales": (torch.float32, ("rank",)),
    "up": (torch.int8, ("outputs", "rank")),
    "up_scales": (torch.float32, ("outputs",)),
    "first": (torch.float16, ("hidden", "rank")),
    "first_bias": (torch.float16, ("hidden",)),
    "second": (torch.float16, ("rank", "hidden")),
    "second_bias": (torch.float16, ("rank",)),
}
"""The tensors of a compensator with their types and axes."""

HIDDEN_PADDING = 64
"""The gate's width is filled up to a multiple of this."""


@dataclass(frozen=True)
class Compensator:
    """y += α · B(γ(Ax) ⊙ Ax), γ(z) = 1 + tanh(W₂ ReLU(W₁ z + b₁) + b₂) (SPEAR, eq. 3).

    The rank r is filled up to a power of two, the gate's width and the outputs to whole tiles, with zeros, which add
    nothing: a latent coordinate that is 0 stays 0.

    Attributes:
        down, up: A and B; down_scales, up_scales: of their rows. first, first_bias, second, second_bias: W₁, b₁, W₂ and
            b₂. alpha: α.
        arrivals: int32 zeros that kernels count in; every launch leaves zeros. One compensator may therefore be in one
            launch at a time; on another stream, use a copy with other counters.
        outputs: of B.
    """

    down: torch.Tensor
    down_scales: torch.Tensor
    up: torch.Tensor
    up_scales: torch.Tensor
    first: torch.Tensor
    first_bias: torch.Tensor
    second: torch.Tensor
    second_bias: torch.Tensor
    alpha: float
    arrivals: torch.Tensor
    outputs: int

    @property
    def rank(self) -> int:
        """The rank r, padded to a power of two."""
        return self.down.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read."""
        parts = (self.down, self.up, self.up_scales, self.first, self.second)
        return sum(part.nbytes for part in parts)


def compensator(
    down: torch.Tensor,
    up: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor,
    second: torch.Tensor,
    second_bias: torch.Tensor,
    alpha: float = 1.0,
) -> Compensator:
    """Round the factors to INT8, row by row and symmetrically, and pad everything with zeros.

    Args:
        down: A, (r, inputs). up: B, (outputs, r). first: W₁, (h, r); first_bias: (h,). second: W₂, (r, h);
            second_bias: (r,). SPEAR's gate has h = 4r.
    """
    small_down, down_scales = _int8(down)
    small_up, up_scales = _int8(up)
    gate = {"first": first, "first_bias": first_bias, "second": second, "second_bias": second_bias}
    factors = {"down": small_down, "down_scales": down_scales, "up": small_up, "up_scales": up_scales}
    return from_int8(factors | {name: part.half() for name, part in gate.items()}, alpha)


def from_int8(parts: Mapping[str, torch.Tensor], alpha: float = 1.0) -> Compensator:
    """Pad `PARTS` that are rounded already, as a checkpoint has them; their sizes are those before padding."""
    (rank, _), outputs, hidden = parts["down"].shape, len(parts["up"]), len(parts["first"])
    missing = {
        "rank": max(16, 1 << (rank - 1).bit_length()) - rank, "hidden": -hidden % HIDDEN_PADDING,
        "outputs": -outputs % ROWS,
    }  # fmt: skip
    padded = {}
    for name, (_, axes) in PARTS.items():
        pads = [side for axis in reversed(axes) for side in (0, missing.get(axis, 0))]
        padded[name] = torch.nn.functional.pad(parts[name], pads).contiguous()
    arrivals = torch.zeros(4096, dtype=torch.int32, device=parts["down"].device)
    return Compensator(**padded, alpha=alpha, arrivals=arrivals, outputs=outputs)


def to_int8(compensator: Compensator, rank: int) -> dict[str, torch.Tensor]:
    """The parts that `from_int8` takes, without what pads them. `rank`: r, before padding."""
    sizes = {"rank": rank, "hidden": 4 * rank, "outputs": compensator.outputs}
    return {
        name: getattr(compensator, name)[tuple(slice(sizes.get(axis)) for axis in axes)]
        for name, (_, axes) in PARTS.items()
    }


def _int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (matrix.float().abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix.float() / scales.unsqueeze(1)).round().to(torch.int8).contiguous(), scales
