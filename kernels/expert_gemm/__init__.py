"""Mixtures of experts: routing, and the product of each token with the weights of its experts."""

from __future__ import annotations

from kernels.dispatch import dispatched
from kernels.expert_gemm import reference

route = dispatched(reference.route)
expert_mlp = dispatched(reference.expert_mlp)
