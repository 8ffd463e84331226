"""AWQ: inputs with large activations get finer steps, by scales that the layer before takes back (Lin et al. 2024)."""

from __future__ import annotations

import torch

from live.adaptation.quantisers.grid import Precision, round_to_nearest

EXPONENTS = tuple(i / 20 for i in range(20))
"""Exponents α that are tried (section 3.2: a grid from 0, no scaling, to 1)."""


def search_scales(
    weight: torch.Tensor, magnitude: torch.Tensor, second_moment: torch.Tensor, precision: Precision
) -> torch.Tensor:
    """The scale of each input with the least error of the output, s = magnitude^α (eq. 4 and 5).

    Args:
        weight: (outputs, inputs). magnitude: E|x| of each input, (inputs,). second_moment: E[x xᵀ].

    Returns:
        s, (inputs,) float32, with √(max s · min s) = 1. Q(W · diag(s)) · diag(s)⁻¹ is nearest to W.
    """
    best, found = float("inf"), torch.ones_like(magnitude)
    for exponent in EXPONENTS:
        scales = magnitude.clamp(min=1e-4).pow(exponent)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = round_to_nearest(weight * scales, precision).dense() / scales
        error = output_error(weight - rounded, second_moment)
        if error < best:
            best, found = error, scales
    return found


def output_error(difference: torch.Tensor, second_moment: torch.Tensor) -> float:
    """E‖ΔW x‖² = tr(ΔW · E[x xᵀ] · ΔWᵀ) of a difference of weights, (outputs, inputs)."""
    return float(((difference @ second_moment) * difference).double().sum())
