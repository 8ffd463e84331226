"""Seconds that one layer's stages of a bundle take for one microbatch.

An attention instance is one GPU with its own sequences, an FFN instance is c GPUs that share the FFN's weights. For a
microbatch of b sequences with T cached tokens on an attention instance, and n sequences of all attention instances on
an FFN instance,

    a = max(T·V_token / bandwidth + s·min(b, 25), s·b) + max(weights / bandwidth, FLOPs / (FLOP/s · η))   attention,
    f = weights(n) / bandwidth + rows(n) · (FLOPs / FLOP/s + bytes / link) / η + d·x/y       FFN, on each of its GPUs,
    e                                                            the way there and back, which nothing hides.

These are the stages of `twin reproduce fastafd`, for any model and with the projections' weights. After the last layer
the attention instance's GPU runs the output head, and the host samples and prepares the next step, which the other
microbatches hide unless one alone sets the step. Bytes and FLOPs follow from the model file (AFD eq. 24 and 27), rates
are the hardware file's peaks. Few tokens do not touch every expert. A row is sent in 8 bits and returned in 16 (eq.
34): once to each expert that it chooses, or to every GPU of a dense FFN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from latency_models.deployment.hardware import Hardware
from latency_models.deployment.models import ExpertFFN, LatentAttention, Model
from latency_models.sources.roofline.efficiency import built_in_efficiency
from latency_models.sources.roofline.placement import CACHE_BYTES, COMPUTED_IN, WEIGHT_BYTES, Cache, Weights
from latency_models.stages import PassLatency

FITTED_SEQUENCES = 25
"""The largest fitted microbatch of an attention instance. Beside more sequences, whose caches are shorter, reading
hides what they cost: a measured step of 201 sequences of 4,096 tokens takes 1.08 times the reading of their caches."""

ROW_BYTES = 3.0
"""Bytes of one activation element to the FFN and back: 8 bits and 16 (eq. 34)."""


class Stages(Protocol):
    """Seconds of one layer's stages."""

    def attention(self, sequences: float) -> tuple[float, float, float]:
        """One microbatch on an attention instance: seconds beside its caches, for each token in them, and at least."""

    def ffn(self, sequences: float) -> float:
        """One microbatch on an FFN instance, with so many sequences of all attention instances that it serves."""

    def exchange(self, sequences: float) -> float:
        """The way to the FFN and back of an attention instance's sequences."""

    def head(self, sequences: float) -> float:
        """The output head of one microbatch on an attention instance, once a step."""

    def host(self, sequences: float) -> float:
        """The host's work between two steps of one microbatch on an attention instance."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers that no data sheet has; fitted to 27 steps of a 235B model (`python -m benchmarks.afd_bundles`)."""

    sequence: float = 2.6e-7
    efficiency: float = 0.57
    source: float = 2.9e-7
    exchange: float = 1.6e-5


@dataclass(frozen=True, slots=True)
class DataSheetStages:
    """Stages from a model and a hardware file; `ratio` is x/y, `link` bytes/s of one GPU's network to others."""

    model: Model
    hardware: Hardware
    ffn_gpus: int
    ratio: float
    weights: Weights
    cache: Cache
    link: float
    measured: Measured

    def attention(self, sequences: float) -> tuple[float, float, float]:
        """Shared experts are computed here, as in `footprint`."""
        model, hidden = self.model, self.model.hidden_size
        token = model.kv_bytes(CACHE_BYTES[self.cache]) / self.hardware.memory_bandwidth
        if isinstance(model.attention, LatentAttention):
            heads, latent = model.attention.heads, model.attention.cached_elements + model.attention.kv_compressed
            token = max(token, 2 * heads * latent / self.hardware.flops("bf16"))
        weights = model.attention.projection_weights(hidden)
        if isinstance(model.ffn, ExpertFFN):
            weights += model.ffn.shared_experts * model.ffn.expert_weights(hidden)
        compute = 2 * weights * sequences / self._flops / self.measured.efficiency
        rows, sequence = max(self._read(weights), compute), self.measured.sequence
        return rows + sequence * min(sequences, FITTED_SEQUENCES), token, rows + sequence * sequences

    def ffn(self, sequences: float) -> float:
        ffn, hidden, gpus = self.model.ffn, self.model.hidden_size, self.ffn_gpus
        if isinstance(ffn, ExpertFFN):
            touched = ffn.experts * (1 - (1 - ffn.experts_per_token / ffn.experts) ** sequences)
            weights, rows = touched * ffn.expert_weights(hidden) / gpus, sequences * ffn.experts_per_token / gpus
            compute = rows * ffn.row_flops(hidden)
        else:
            weights, rows = ffn.weights(hidden) / gpus, sequences
            compute = rows * ffn.row_flops(hidden) / gpus
        busy = compute / self._flops + rows * ROW_BYTES * hidden / self.link
        return self._read(weights) + busy / self.measured.efficiency + self.measured.source * self.ratio

    def exchange(self, sequences: float) -> float:
        """The rows' transfer is in the FFN's time."""
        return self.measured.exchange

    def head(self, sequences: float) -> float:
        """It is in bf16, as source `roofline` has it."""
        weights = self.model.vocabulary * self.model.hidden_size
        reading = weights * WEIGHT_BYTES["bf16"] / self.hardware.memory_bandwidth
        return max(reading, 2 * weights * sequences / self.hardware.flops("bf16") / self.measured.efficiency)

    def host(self, sequences: float) -> float:
        """The host time of source `roofline`, fitted to engines without bundles."""
        return built_in_efficiency().engine.per_sequence * sequences

    @property
    def _flops(self) -> float:
        return self.hardware.flops(COMPUTED_IN[self.weights])

    def _read(self, weights: float) -> float:
        return weights * WEIGHT_BYTES[self.weights] / self.hardware.memory_bandwidth


@dataclass(frozen=True, slots=True)
class CalibratedStages:
    """Stages from the lines of a calibration (AFD 3.2), of a whole decode step in `latency`."""

    latency: PassLatency
    layers: int

    def attention(self, sequences: float) -> tuple[float, float, float]:
        alpha, beta = self.latency.attention
        return beta / self.layers, alpha / self.layers, 0.0

    def ffn(self, sequences: float) -> float:
        alpha, beta = self.latency.ffn
        return (alpha * sequences + beta) / self.layers

    def exchange(self, sequences: float) -> float:
        alpha, beta = self.latency.communication
        return (alpha * sequences + beta) / self.layers

    def head(self, sequences: float) -> float:
        """Not among the lines."""
        return 0.0

    def host(self, sequences: float) -> float:
        """Not among the lines."""
        return 0.0
