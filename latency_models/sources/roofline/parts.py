"""The parts of a step, and the kind of kernel that each of them has."""

from __future__ import annotations

from typing import cast

from latency_models.deployment.hardware import Hardware, Precision
from latency_models.deployment.models import ExpertFFN, LatentAttention, Model
from latency_models.sources.roofline.efficiency import Family, Kind, all_reduce_kind
from latency_models.sources.roofline.placement import Placement, Weights

ABOUT = {
    "linear_kernels": "linear layers",
    "experts_kernels": "experts",
    "prompt_attention_kernels": "attention of prompts",
    "decode_attention_kernels": "attention of decodes",
    "elementwise_kernels": "elementwise kernels",
    "all_reduce_kernels": "all-reduces",
}
"""Parts of a step whose errors are independent of each other, in words."""

WHOLE_STEP = "whole_step"
"""The name of the error of all parts together."""

_FITTED_AS: dict[Weights, Weights] = {"int8": "fp8"}
"""Formats that were not measured, and those whose kernels stand for them: the peaks of INT8 and FP8 are the same."""


MORE_PRECISE: dict[Kind, tuple[tuple[Kind, Precision], ...]] = {
    "linear_fp8": (("linear_bf16", "bf16"),),
    "linear_fp4": (("linear_fp8", "fp8"), ("linear_bf16", "bf16")),
    "experts_fp8": (("experts_bf16", "bf16"),),
    "experts_fp4": (("experts_fp8", "fp8"), ("experts_bf16", "bf16")),
    "experts_mxfp4": (("experts_bf16", "bf16"),),
    "prompt_attention_fp8": (("prompt_attention_bf16", "bf16"),),
}
"""Kinds whose kernels an engine can use after unpacking the weights, and what these compute in. The fastest is taken,
so that a less precise format is never slower."""


def family(model: Model) -> Family:
    """The family of a model, by which errors of served steps are known."""
    if isinstance(model.attention, LatentAttention):
        return "latent"
    return "experts" if isinstance(model.ffn, ExpertFFN) else "dense"


def linear_kind(weights: Weights) -> Kind:
    """The kind of linear layers with weights of a format."""
    return cast("Kind", f"linear_{_FITTED_AS.get(weights, weights)}")


def kinds_of_parts(model: Model, hardware: Hardware, placement: Placement) -> dict[str, Kind]:
    """The kind of kernel of each part of a step; parts that this placement lacks are left out."""
    latent = isinstance(model.attention, LatentAttention)
    found: dict[str, Kind] = {
        "linear_kernels": linear_kind(placement.weights),
        "prompt_attention_kernels": "prompt_latent" if latent else cast("Kind", f"prompt_attention_{placement.cache}"),
        "decode_attention_kernels": "decode_latent" if latent else cast("Kind", f"decode_attention_{placement.cache}"),
        "elementwise_kernels": "elementwise",
    }
    if isinstance(model.ffn, ExpertFFN):
        found["experts_kernels"] = cast("Kind", f"experts_{_FITTED_AS.get(placement.experts, placement.experts)}")
    if placement.devices > 1:
        found["all_reduce_kernels"] = all_reduce_kind(hardware)
    return found
