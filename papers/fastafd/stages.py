"""Seconds of one layer's stages, and the decode step that two alternating microbatches make of them.

A bundle has one FFN tray, over whose GPUs the experts lie once, and r attention trays, each of whose GPUs holds its own
sequences. For one microbatch of b sequences on every attention GPU, n = 4·r·b tokens reach the FFN tray. In one layer

    a = b·context·V_token / bandwidth + s·b                      the attention GPU,
    f = distinct(n)·expert bytes / (4·bandwidth)
        + (8·n/4)·(6·H·I / FLOP/s + 3·H / link) / η + d·r        the FFN GPU,
    c                                                            the way there and back, which nothing hides.

V_token, the expert's bytes and FLOPs follow from the model file (AFD eq. 24 and 27), the rates are the hardware file's
peaks, and η, s, d and c are fitted (`fit_bundle`). Few tokens do not touch every expert:
distinct(n) = E (1 − (1 − k/E)^n) of E experts, for tokens that choose k of them evenly. A row is sent in 8 bits and
returned in 16 (eq. 34), once for every expert that it goes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from latency_models.deployment.hardware import WEIGHT_BYTES, Hardware
from latency_models.deployment.models import ExpertFFN, Model
from papers.fastafd.measurements import TRAY, StepMeasurement
from workloads.errors import BadInput

KV_BYTES = 2.0
"""Bytes of one element of the KV cache. The measured capacities imply 16 bits."""

ROW_BYTES = 3.0
"""Bytes of one activation element to an expert and back: 8 bits and 16 (eq. 34)."""

MICROBATCHES = 2
PRECISION: Final = "fp8"


@dataclass(frozen=True, slots=True)
class BundleParameters:
    """The fitted numbers of a bundle, s, η, d and c; seconds are of one layer and microbatch."""

    sequence_seconds: float
    row_efficiency: float
    tray_seconds: float
    exchange_seconds: float


@dataclass(frozen=True, slots=True)
class LayerStages:
    """Stage times of one layer of a mixture-of-experts model on one kind of GPU."""

    hardware: Hardware
    model: Model

    @property
    def experts(self) -> ExpertFFN:
        if not isinstance(self.model.ffn, ExpertFFN):
            raise BadInput("expected a mixture of experts", field="model", value=self.model.name)
        return self.model.ffn

    def kv_read(self, sequences: float, context: int) -> float:
        """Reading the KV cache of this many sequences at the full memory bandwidth."""
        return sequences * context * self.model.kv_bytes(KV_BYTES) / self.hardware.memory_bandwidth

    def expert_read(self, tokens: float, gpus: int) -> float:
        """Reading the weights of the experts that `tokens` choose, on one of the `gpus` that share them evenly."""
        ffn = self.experts
        distinct = distinct_experts(tokens, ffn.experts, ffn.experts_per_token)
        weights = distinct * ffn.expert_weights(self.model.hidden_size) * WEIGHT_BYTES[PRECISION]
        return weights / gpus / self.hardware.memory_bandwidth

    def rows(self, tokens: float, gpus: int, efficiency: float) -> float:
        """Receiving, computing and returning the rows that `tokens` send to one of the `gpus`."""
        hidden, ffn = self.model.hidden_size, self.experts
        compute = ffn.row_flops(hidden) / self.hardware.flops(PRECISION)
        transfer = ROW_BYTES * hidden / self.hardware.network.intra_node
        return tokens * ffn.experts_per_token / gpus * (compute + transfer) / efficiency

    def attention(self, parameters: BundleParameters, sequences: float, context: int) -> float:
        """One microbatch on an attention GPU, a."""
        return self.kv_read(sequences, context) + parameters.sequence_seconds * sequences

    def ffn(self, parameters: BundleParameters, sequences: float, ratio: float) -> float:
        """One microbatch on a GPU of the FFN tray, f, with `sequences` from every attention GPU."""
        tokens = TRAY * ratio * sequences
        busy = self.expert_read(tokens, TRAY) + self.rows(tokens, TRAY, parameters.row_efficiency)
        return busy + parameters.tray_seconds * ratio


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """One decode step. `bound`: what sets its length: `attention`, `ffn`, or the `round trip` of one microbatch."""

    tpot: float
    bound: str


def predict_step(
    stages: LayerStages, parameters: BundleParameters, prompt_tokens: int, batch_size: int, ratio: float
) -> PredictedStep:
    """The decode step of a bundle with one FFN tray and `ratio` attention trays."""
    sizes = microbatch_sizes(batch_size)
    attention = [stages.attention(parameters, size, prompt_tokens) for size in sizes]
    ffn = [stages.ffn(parameters, size, ratio) for size in sizes]
    periods = layer_periods(attention, ffn, parameters.exchange_seconds)
    bound = max(periods, key=periods.__getitem__)
    return PredictedStep(periods[bound] * stages.model.layers, bound)


def layer_periods(attention: Sequence[float], ffn: Sequence[float], exchange: float) -> dict[str, float]:
    """Lower bounds of the time in which every microbatch passes one layer; the largest is exact.

    The period of such a ring is the largest cycle mean of its event graph (`docs/explanation/afd-theory.md`).
    """
    return {
        "attention": sum(attention),
        "ffn": sum(ffn),
        "round trip": max(a + f for a, f in zip(attention, ffn, strict=True)) + exchange,
    }


def microbatch_sizes(batch_size: int) -> list[int]:
    """The sequences of each microbatch: two halves, or a single one of one sequence."""
    return [size for size in (-(-batch_size // MICROBATCHES), batch_size // MICROBATCHES) if size]


def distinct_experts(tokens: float, experts: int, per_token: int) -> float:
    """Mean number of experts that some of the tokens choose, if each chooses `per_token` of them evenly."""
    return float(experts * (1 - (1 - per_token / experts) ** tokens))


def throughput_per_gpu(batch_size: int, ratio: float, tpot: float) -> float:
    """Output tokens a second and GPU of a bundle, its FFN tray included."""
    return batch_size * ratio / (ratio + 1) / tpot


Floats = NDArray[np.float64]

SCATTER = 0.012
"""Relative standard deviation of one measured step."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A parameter as expected before any step is seen: a median, and the standard deviation of its logarithm."""

    median: float
    spread: float
    reason: str


def priors(stages: LayerStages) -> dict[str, Prior]:
    return {
        "sequence_seconds": Prior(1e-6, 1.0, "the order of a kernel's fixed part; hardly known"),
        "row_efficiency": Prior(stages.hardware.efficiency.compute, 0.3, "the hardware file's share of peak FLOP/s"),
        "tray_seconds": Prior(2e-6, 0.5, "half a microsecond for each GPU of a tray"),
        "exchange_seconds": Prior(39e-6, 1.5, "reported dispatch and combine calls, 17 and 22 µs; hidden in part"),
    }


def fit_bundle(stages: LayerStages, measured: Sequence[StepMeasurement]) -> BundleParameters:
    """Fit the parameters to measured steps; without any, they are the medians of the prior."""
    from scipy.optimize import least_squares

    expected = priors(stages)
    medians = np.log([expected[field.name].median for field in fields(BundleParameters)])
    spreads = np.array([expected[field.name].spread for field in fields(BundleParameters)])

    def residuals(logarithms: Floats) -> Floats:
        parameters = BundleParameters(*np.exp(logarithms).tolist())
        errors = np.array([relative_error(stages, parameters, row) for row in measured])
        return np.concatenate([_soften(errors / SCATTER), (logarithms - medians) / spreads])

    # The period is a maximum, so the loss has kinks: the best of several starts.
    starts = [medians + shift * np.array([1, 0, 0, 0]) + last * np.array([0, 0, 0, 1]) for shift, last in STARTS]
    solutions = [least_squares(residuals, start) for start in starts]
    best = min(solutions, key=lambda solution: float(solution.cost))
    return BundleParameters(*np.exp(best.x).tolist())


STARTS = [(shift, last) for shift in (-0.5, 0.5) for last in (-0.5, 0.5)]
"""Starting points of a fit: shifts of the logarithms of the first and the last parameter from their medians."""


def relative_error(stages: LayerStages, parameters: BundleParameters, row: StepMeasurement) -> float:
    return predict_step(stages, parameters, row.prompt_tokens, row.batch_size, row.ratio).tpot / row.tpot - 1


def _soften(residuals: Floats) -> Floats:
    """Residuals whose squares are the soft-L1 loss 2 (√(1 + z²) − 1)."""
    softened: Floats = np.sign(residuals) * np.sqrt(2 * (np.sqrt(1 + residuals**2) - 1))
    return softened
