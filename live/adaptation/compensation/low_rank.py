"""Static terms of low rank: Ŵ + B · A, the same for every token. Baselines, and where compensators begin."""

from __future__ import annotations

import torch

FLOOR = 1e-6
"""The least eigenvalue that an inputs' second moment is given, as a share of their mean, so that it has an inverse."""


def svd_factors(error: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A, (rank, inputs), and B, (outputs, rank), with B · A nearest to an error W − Ŵ (LQER, Zhang et al. 2024).

    Singular values are divided evenly between the factors.
    """
    left, values, right = torch.linalg.svd(error.double(), full_matrices=False)
    root = values[:rank].sqrt()
    return (root.unsqueeze(1) * right[:rank]).float(), (left[:, :rank] * root).float()


def whitened_factors(error: torch.Tensor, second_moment: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B with the least E‖(W − Ŵ − B · A) x‖² (QERA's exact solution, Zhang et al. 2025; EoRA in its eigenbasis).

    With R = E[x xᵀ], they are the truncated SVD of (W − Ŵ) R^½, and A is multiplied with R^−½.

    Args:
        error: W − Ŵ, (outputs, inputs). second_moment: R, (inputs, inputs).
    """
    values, vectors = torch.linalg.eigh(second_moment.double())
    values = values.clamp(min=FLOOR * float(values.mean())).sqrt()
    root, inverse = vectors * values @ vectors.T, vectors / values @ vectors.T
    down, up = svd_factors(error.double() @ root, rank)
    return (down.double() @ inverse).float(), up
