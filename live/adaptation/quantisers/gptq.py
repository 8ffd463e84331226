"""GPTQ: columns are rounded one after the other, and those that follow make up for each error (Frantar et al. 2022)."""

from __future__ import annotations

import torch

from live.adaptation.quantisers.grid import Grid, Precision, QuantisedMatrix, fit_grid, grouped

DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean (section 3.3, step 3)."""


def gptq(weight: torch.Tensor, second_moment: torch.Tensor, precision: Precision) -> QuantisedMatrix:
    """Round a weight so that its product with the given inputs changes little.

    The error of column q, (w_q − ŵ_q) / U_qq, is subtracted from each later column j, times U_qj (eq. 2 and 3, with
    U the upper Cholesky factor of the inverse Hessian). A group's grid is fitted to its columns as they are when their
    turn comes; whole rows' grids, to the given weight.

    Args:
        weight: (outputs, inputs). second_moment: E[x xᵀ] of the inputs, (inputs, inputs), in any scale.
    """
    left = weight.float().clone()
    inputs = weight.shape[1]
    span = precision.span(inputs)
    factor = _inverse_factor(second_moment)
    codes = torch.empty_like(left)
    grids = []
    for column in range(inputs):
        if column % span == 0:
            begin = left if precision.group != -1 else weight.float()
            grids.append(fit_grid(grouped(begin[:, column : column + span], span), precision.bits))
        grid = Grid(grids[-1].scale[:, 0], grids[-1].zero[:, 0], precision.bits)
        codes[:, column] = grid.codes(left[:, column])
        error = (left[:, column] - grid.values(codes[:, column])) / factor[column, column]
        left[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])
    scales, zeros = (torch.cat([getattr(grid, name) for grid in grids], dim=1) for name in ("scale", "zero"))
    return QuantisedMatrix(codes.to(torch.uint8), scales.half(), zeros.to(torch.uint8), precision)


def _inverse_factor(second_moment: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float32."""
    hessian = second_moment.double().clone()
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0  # inputs that never occur
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: torch.Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor
