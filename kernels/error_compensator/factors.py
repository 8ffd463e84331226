"""The parts of an error compensator: INT8 factors with one scale a row, and the gate's two small layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.w4_gemm.pack import ROWS

HIDDEN_PADDING = 64
"""The gate's width is filled up to a multiple of this."""


@dataclass(frozen=True)
class Compensator:
    """y += α · B(γ(Ax) ⊙ Ax), γ(z) = 1 + tanh(W₂ ReLU(W₁ z + b₁) + b₂) (SPEAR, eq. 3).

    The rank r is filled up to a power of two, the gate's width and the outputs to whole tiles, with zeros, which add
    nothing: a latent coordinate that is 0 stays 0.

    Attributes:
        down: A, (rank, inputs) int8; down_scales: (rank,) float32, of its rows.
        up: B, (rows, rank) int8; up_scales: (rows,) float32.
        first, first_bias: W₁ (hidden, rank) and b₁. second, second_bias: W₂ (rank, hidden) and b₂. All float16.
        alpha: α.
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
    gate = (first.half(), first_bias.half(), second.half(), second_bias.half())
    return from_int8(small_down, down_scales, small_up, up_scales, *gate, alpha)


def from_int8(
    down: torch.Tensor,
    down_scales: torch.Tensor,
    up: torch.Tensor,
    up_scales: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor,
    second: torch.Tensor,
    second_bias: torch.Tensor,
    alpha: float = 1.0,
) -> Compensator:
    """Pad parts that are rounded already, as a checkpoint has them.

    Args:
        down: A, (r, inputs) int8; down_scales: (r,) float32. up: B, (outputs, r) int8; up_scales: (outputs,) float32.
        first: W₁, (h, r); first_bias: (h,). second: W₂, (r, h); second_bias: (r,). All float16.
    """
    pad, outputs = torch.nn.functional.pad, up.shape[0]
    more_rank = max(16, 1 << (down.shape[0] - 1).bit_length()) - down.shape[0]
    more_hidden, more_rows = -first.shape[0] % HIDDEN_PADDING, -outputs % ROWS
    return Compensator(
        pad(down, (0, 0, 0, more_rank)).contiguous(),
        pad(down_scales, (0, more_rank)),
        pad(up, (0, more_rank, 0, more_rows)).contiguous(),
        pad(up_scales, (0, more_rows)),
        pad(first, (0, more_rank, 0, more_hidden)).contiguous(),
        pad(first_bias, (0, more_hidden)),
        pad(second, (0, more_hidden, 0, more_rank)).contiguous(),
        pad(second_bias, (0, more_rank)),
        alpha,
        torch.zeros(4096, dtype=torch.int32, device=down.device),
        outputs,
    )


def to_int8(compensator: Compensator, rank: int) -> dict[str, torch.Tensor]:
    """The parts that `from_int8` takes, by name, without what pads them. `rank`: r, before padding."""
    hidden = 4 * rank
    return {
        "down": compensator.down[:rank],
        "down_scales": compensator.down_scales[:rank],
        "up": compensator.up[: compensator.outputs, :rank],
        "up_scales": compensator.up_scales[: compensator.outputs],
        "first": compensator.first[:hidden, :rank],
        "first_bias": compensator.first_bias[:hidden],
        "second": compensator.second[:rank, :hidden],
        "second_bias": compensator.second_bias[:rank],
    }


def _int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (matrix.float().abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix.float() / scales.unsqueeze(1)).round().to(torch.int8).contiguous(), scales
