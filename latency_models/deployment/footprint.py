"""Bytes that a model takes on the cards of an AFD deployment: weights, and KV cache per token.

Attention cards hold the attention projections, norms, router and embeddings; the shared experts too, unless the
deployment puts them on the FFN cards. FFN cards hold the experts, and the dense layers split over them. The
roofline charges no time for embeddings, the router and dense layers of a mixture of experts, but they take memory.
Scales of quantised weights and the MTP module are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from latency_models.deployment.hardware import WEIGHT_BYTES
from latency_models.deployment.models import ExpertFFN, Model
from latency_models.deployment.roofline import Deployment, cards_of_ffn_instance, experts_on_card


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one attention card and on one FFN card; KV bytes of one token over all layers."""

    attention_weights: float
    ffn_weights: float
    kv_bytes_per_token: float


def footprint(model: Model, deployment: Deployment) -> Footprint:
    """The bytes that `deployment` puts on each card, with one card an attention instance."""
    hidden, attention, ffn = model.hidden_size, model.attention, model.ffn
    layer = attention.projection_weights(hidden) + attention.norm_weights + 2 * hidden
    on_attention = model.layers * layer + model.embedding_parameters + hidden
    cards = cards_of_ffn_instance(model, deployment)
    if isinstance(ffn, ExpertFFN):
        expert, expert_layers = ffn.expert_weights(hidden), model.layers - ffn.dense_layers
        shared = ffn.shared_experts * expert
        router = ffn.weights(hidden) - (ffn.experts + ffn.shared_experts) * expert
        on_attention += expert_layers * (router + (0 if deployment.shared_experts else shared))
        resident = experts_on_card(ffn, deployment) * expert + (shared if deployment.shared_experts else 0)
        dense = ffn.dense_layers * 3 * hidden * ffn.dense_intermediate_size / cards
        on_ffn = expert_layers * resident + dense
    else:
        on_ffn = model.layers * ffn.weights(hidden) / cards
    weight = WEIGHT_BYTES[deployment.precision]
    return Footprint(on_attention * weight, on_ffn * weight, model.kv_bytes(deployment.kv_bytes) * model.layers)
