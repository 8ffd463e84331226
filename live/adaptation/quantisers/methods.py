"""Two quantisers of linear layers that know the layers' inputs: AWQ and GPTQ."""

from __future__ import annotations

import torch

from live.adaptation.quantisers.grid import Grid, Precision, QuantisedMatrix, fit_grid, grouped, round_to_nearest

EXPONENTS = tuple(i / 20 for i in range(20))
"""Exponents α that are tried (section 3.2: a grid from 0, no scaling, to 1)."""

DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean (section 3.3, step 3)."""


def search_scales(
    weight: torch.Tensor, magnitude: torch.Tensor, second_moment: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """AWQ: the scale s of each input, (inputs,), with the least error, s = magnitude^α (Lin et al. 2024, eq. 4 and 5).

    Inputs with large activations get finer steps, by scales that the layer before takes back; √(max s · min s) = 1.
    """
    best, best_scales = float("inf"), torch.ones_like(magnitude)
    for exponent in EXPONENTS:
        scales = magnitude.clamp(min=1e-4).pow(exponent)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to_nearest(weight * scales, precision).dense() / scales
        error = output_error(weight - rounded, second_moment)
        if error < best:
            best, best_scales = error, scales
    return best_scales


def output_error(difference: torch.Tensor, second_moment: torch.Tensor) -> float:
    """E‖ΔW x‖² = tr(ΔW · E[x xᵀ] · ΔWᵀ) of a difference of weights, (outputs, inputs)."""
    return float(((difference @ second_moment) * difference).double().sum())


def gptq(weight: torch.Tensor, second_moment: torch.Tensor, precision: Precision) -> QuantisedMatrix:
    """GPTQ: round a weight so that its product with the given inputs changes little (Frantar et al. 2022).

    Columns are rounded one after the other, and those that follow make up for each error. The error of column q, (w_q −
    ŵ_q) / U_qq, is subtracted from each later column j, times U_qj (eq. 2 and 3, with U the upper Cholesky factor of
    the inverse Hessian of E[x xᵀ], (inputs, inputs)). A group's grid is fitted when its turn comes.
    """
    remaining = weight.float().clone()
    inputs = weight.shape[1]
    span = precision.span(inputs)
    factor = _inverse_factor(second_moment)
    codes = torch.empty_like(remaining)
    grids = []
    for column in range(inputs):
        if column % span == 0:
            begin = remaining if precision.group != -1 else weight.float()
            grids.append(fit_grid(grouped(begin[:, column : column + span], span), precision.bits))
        grid = Grid(grids[-1].scale[:, 0], grids[-1].zero[:, 0], precision.bits)
        codes[:, column] = grid.codes(remaining[:, column])
        error = (remaining[:, column] - grid.values(codes[:, column])) / factor[column, column]
        remaining[:, column + 1 :] -= torch.outer(error, factor[column, column + 1 :])
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
