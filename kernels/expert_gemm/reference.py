"""The mathematics of a mixture of experts (Qwen3-MoE's form)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


def route(logits: torch.Tensor, top_k: int, renormalise: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, and their weights.

    Args:
        logits: (tokens, experts), the router's. chosen: experts a token. renormalise: weights sum to 1 over the chosen.

    Returns:
        weights, (tokens, chosen) float32 (or the logits' type if wider), largest first, softmax over all experts; and
        experts, (tokens, chosen) int32; of equals, the lower number first.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(dim=-1).gather(1, experts)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts.to(torch.int32)


def expert_mlp(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """y[t] = Σⱼ weights[t, j] · downₑ (silu(gateₑ x[t]) ⊙ upₑ x[t]), e = experts[t, j].

    Args:
        x: (tokens, hidden). weights, experts: (tokens, chosen), from `route`. gate_up: (experts, 2 · intermediate,
            hidden), the gate's rows first. down: (experts, hidden, intermediate).

    Returns:
        (tokens, hidden) in x's type; everything in float32, or wider if x is.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        gate, up = linear(x[token].to(wide), gate_up[expert].to(wide)).chunk(2, dim=-1)
        output = linear(silu(gate) * up, down[expert].to(wide))
        y.index_add_(0, token, output * weights[token, place].to(wide).unsqueeze(1))
    return y.to(x.dtype)
