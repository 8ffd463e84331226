"""The limits of one device with a dense model, and a roofline's step time, for the Prelude experiments."""

from __future__ import annotations

from latency_models.deployment.hardware import WEIGHT_BYTES, Hardware
from latency_models.deployment.models import Model

CACHE_BYTES = 2.0
"""Bytes of one KV element, BF16 like the weights."""


def weight_bytes(model: Model) -> float:
    """Bytes of weights that a forward pass reads: every layer, and the output head."""
    return (_layer_weights(model) + model.vocabulary * model.hidden_size) * WEIGHT_BYTES["bf16"]


def floor_seconds(model: Model, hardware: Hardware, prompts: int, tokens: int) -> float:
    """The shortest time of a forward pass over `prompts` whole prompts of `tokens` tokens on one device.

    FLOPs over peak (causal attention, and the head for last tokens) or weight bytes over bandwidth, without launches.
    """
    pairs = tokens * (tokens + 1) / 2
    attention = 4 * model.attention.heads * _head_dim(model) * model.layers * pairs
    flops = prompts * (2 * _layer_weights(model) * tokens + attention + 2 * model.vocabulary * model.hidden_size)
    return max(flops / hardware.flops("bf16"), weight_bytes(model) / hardware.memory_bandwidth)


def step_line(model: Model, hardware: Hardware) -> dict[str, float]:
    """Seconds a step, a token, and a cached token: a roofline whose parts are added up, so an upper bound."""
    bandwidth = hardware.memory_bandwidth * hardware.efficiency.memory
    rate = hardware.flops("bf16") * hardware.efficiency.compute
    cached = model.kv_bytes_per_token(CACHE_BYTES)
    return {
        "overhead": weight_bytes(model) / bandwidth,
        "per_token": 2 * _layer_weights(model) / rate,
        "per_kv_token": cached / bandwidth,
    }


def _layer_weights(model: Model) -> float:
    hidden = model.hidden_size
    return model.layers * (model.attention.projection_weights(hidden) + model.ffn.weights(hidden))


def _head_dim(model: Model) -> int:
    attention = model.attention
    assert attention.kind == "gqa"  # both of the paper's models
    return attention.head_dim
