"""Mixtures of experts: routing, and the product of each token with the weights of its experts."""

from __future__ import annotations

import torch

from kernels.expert_gemm import reference


def route(logits: torch.Tensor, chosen: int, renormalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference.route`, on CUDA by one kernel."""
    if logits.is_cuda:
        from kernels.expert_gemm import triton

        return triton.route(logits.contiguous(), chosen, renormalise)
    return reference.route(logits, chosen, renormalise)


def expert_mlp(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Compute `reference.expert_mlp`, on CUDA by four kernels and without waiting for the routing."""
    if x.is_cuda:
        from kernels.expert_gemm import triton

        return triton.expert_mlp(x.contiguous(), weights, experts, gate_up, down)
    return reference.expert_mlp(x, weights, experts, gate_up, down)
