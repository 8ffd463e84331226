"""Step times of an AFD bundle as one decode engine, and the seconds of its stages.

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

A step gives every sequence of the bundle one token. m microbatches alternate between attention and FFN, so a layer
takes the longest of: all attention stages, all FFN stages, one direction of the link, and one microbatch that never
waits (`docs/explanation/afd-theory.md`). Once in a step of L layers the attention instances run the output head, h, for
each microbatch, and the host takes o between two steps of a microbatch:

    Z = max(m·(L·a + h), m·L·f, m·L·e/2, L·(a + f + e) + h + o).

Sequences are taken to be spread evenly over attention instances and microbatches. Their caches are not: the FFN waits
for the fullest of x instances. With contexts whose standard deviation is `context_cv` of their mean, the sums of b of
them have a standard deviation of context_cv·mean·√b, and the largest of x exceeds the mean by h(x) of these, as for
normal sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from latency_models.calibration import Calibration
from latency_models.deployment.hardware import Deployment, Footprint, Hardware, Precision, footprint, load_hardware
from latency_models.deployment.models import ExpertFFN, LatentAttention, Model
from latency_models.io.config_io import checked, read_yaml
from latency_models.io.files import NameOrFile, find_data
from latency_models.sources.registry import SourceSpec, register
from latency_models.sources.roofline.efficiency import built_in_efficiency
from latency_models.sources.roofline.placement import CACHE_BYTES, COMPUTED_IN, RESERVED, WEIGHT_BYTES, Cache, Weights
from latency_models.stages import PassLatency
from latency_models.step_time import MeasuredDeployment, Origin, StepTime, Unknown
from schedulers.batches import Batch
from workloads.errors import BadInput

FITTED_SEQUENCES = 25
"""The largest fitted microbatch of an attention instance. Beside more sequences, whose caches are shorter, reading
hides what they cost: a measured step of 201 sequences of 4,096 tokens takes 1.08 times the reading of their caches."""

ROW_BYTES = 3.0
"""Bytes of one activation element to the FFN and back: 8 bits and 16 (eq. 34)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers that no data sheet has; fitted to 27 steps of a 235B model (`python -m benchmarks.afd_bundles`)."""

    sequence: float = 2.6e-7
    efficiency: float = 0.57
    source: float = 2.9e-7
    exchange: float = 1.6e-5


@dataclass(frozen=True, slots=True)
class DataSheetStages:
    """Seconds of one layer's stages, from a model and a hardware file.

    `ratio` is x/y, `link` bytes/s of one GPU's network to others.
    """

    model: Model
    hardware: Hardware
    ffn_gpus: int
    ratio: float
    weights: Weights
    cache: Cache
    link: float
    measured: Measured

    def attention(self, sequences: float) -> tuple[float, float, float]:
        """One microbatch on an attention instance: seconds beside its caches, for each token in them, and at least.

        Shared experts are computed here, as in `footprint`.
        """
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
        """One microbatch on an FFN instance, with so many sequences of all attention instances that it serves."""
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
        """The way to the FFN and back of an attention instance's sequences, but for the transfer of rows."""
        return self.measured.exchange

    def head(self, sequences: float) -> float:
        """The output head of one microbatch on an attention instance, once a step; in bf16, as in source `roofline`."""
        weights = self.model.vocabulary * self.model.hidden_size
        reading = weights * WEIGHT_BYTES["bf16"] / self.hardware.memory_bandwidth
        return max(reading, 2 * weights * sequences / self.hardware.flops("bf16") / self.measured.efficiency)

    def host(self, sequences: float) -> float:
        """The host's work between two steps of one microbatch: that of source `roofline`, fitted without bundles."""
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


FITTED_ON = "gb200"
"""The hardware file of the measured bundles."""

SAME_DEVICE, OTHER_DEVICE = 0.1, 0.25
"""Deviations of a step's time: the step of another model's bundle on the same GPU is predicted 10.3 % too long. On
other GPUs nothing was measured; shares of peaks differ by some 25 % from one GPU to the next (source roofline)."""

ROWS, EXCHANGE = 0.3, 0.5
"""Deviations of the rows' efficiency and of the exchange on other devices. The first is the prior of `twin reproduce
fastafd`; of the exchange, reported calls take 39 µs, of which 22 are not hidden."""


Bounds: TypeAlias = tuple[tuple[float, float], tuple[float, float], float]
"""A step's seconds, and seconds a cached token, of all attention stages and of one microbatch alone; a step's seconds
whatever is cached."""


@dataclass(frozen=True, slots=True)
class Shape:
    """x attention instances of one GPU, y FFN instances of `ffn_gpus`, and m microbatches in flight."""

    attention_instances: int
    ffn_instances: int
    ffn_gpus: int
    microbatches: int

    @property
    def gpus(self) -> int:
        """GPUs of the bundle."""
        return self.attention_instances + self.ffn_instances * self.ffn_gpus


@dataclass(eq=False)
class BundleStepTime(StepTime):
    """Decode steps of a bundle: `context_cv` is the deviation over mean of running contexts, `scale` a factor."""

    model: Model
    hardware: Hardware
    shape: Shape
    stages: DataSheetStages | CalibratedStages
    weights: Weights
    cache: Cache
    context_cv: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        self._fullest = self.context_cv * expected_largest(self.shape.attention_instances)
        self._known: dict[int, Bounds] = {}

    # -- the protocol ------------------------------------------------------------------------------------------------

    def seconds(self, batch: Batch) -> float:
        """Prompts, as of preempted sequences, pass by themselves on one instance."""
        decodes, seconds = batch.n_decodes, 0.0
        if decodes:
            (seconds,) = self.decode_seconds(decodes, batch.decode_kv, batch.longest_decode, 1)
        if batch.chunks:
            cached = sum(chunk.context + chunk.tokens for chunk in batch.chunks)
            rows, stages = batch.prefill_tokens, self.stages
            fixed, token, minimum = stages.attention(rows)
            layer = max(fixed + token * cached, minimum) + stages.ffn(rows) + stages.exchange(rows)
            first_tokens = sum(chunk.last for chunk in batch.chunks)
            ends = stages.head(first_tokens) + stages.host(first_tokens) if first_tokens else 0.0
            seconds += self.scale * (self.model.layers * layer + ends)
        return seconds

    def decode_seconds(self, decodes: int, kv: int, longest: int, steps: int) -> list[float]:
        (attention, token), (latency, its_token), floor = self._bounds(decodes)
        run = range(kv, kv + decodes * steps, decodes)
        return [max(attention + token * tokens, latency + its_token * tokens, floor) for tokens in run]

    def unknowns(self) -> tuple[Unknown, ...]:
        """The unknowns of data sheets; of a calibration's lines the error is not known."""
        if not isinstance(self.stages, DataSheetStages):
            return ()
        name, same = self.hardware.name, self.hardware.name == FITTED_ON
        about = "steps of AFD bundles" + ("" if same else f" on {name}, by those of another GPU")
        basis, spread = ("held out", SAME_DEVICE) if same else ("assumed", OTHER_DEVICE)
        step = Unknown("bundle_step", about, basis, spread, "TPOT of a bundle")  # type: ignore[arg-type]
        if same:
            return (step,)
        return (
            step,
            Unknown("bundle_rows", f"efficiency of FFN rows on {name}", "assumed", ROWS, "FFN steps over the ratio"),
            Unknown("bundle_exchange", f"exchange between instances on {name}", "assumed", EXCHANGE, "small batches"),
        )

    def vary(self, scores: Mapping[str, float]) -> BundleStepTime:
        factors = {unknown.name: unknown.factor(scores.get(unknown.name, 0.0)) for unknown in self.unknowns()}
        stages, scale = self.stages, self.scale * factors.get("bundle_step", 1.0)
        if isinstance(stages, DataSheetStages):
            centre = stages.measured
            efficiency = centre.efficiency / factors.get("bundle_rows", 1.0)
            exchange = centre.exchange * factors.get("bundle_exchange", 1.0)
            stages = replace(stages, measured=replace(centre, efficiency=efficiency, exchange=exchange))
        return replace(self, stages=stages, scale=scale)

    def measured_deployment(self) -> MeasuredDeployment:
        """Nothing was measured, but the model and the devices are known."""
        note = "decode steps of an AFD bundle from a calibration's lines"
        if isinstance(self.stages, DataSheetStages):
            note = "steps of an AFD bundle from data sheets, and four numbers fitted to one model's bundles on GB200"
        return MeasuredDeployment(
            Origin(), self.model, None, (note,),
            measured=False, device=self.hardware.name, devices=self.shape.gpus,
        )  # fmt: skip

    def kv_tokens(self, gpu_memory_utilization: float, max_num_seqs: int, *, mtp: bool = False) -> float:
        """Tokens of all attention instances together, without MTP modules."""
        need, limit = self.footprint.ffn_weights + RESERVED, self.hardware.memory_capacity * gpu_memory_utilization
        if need > limit:
            size, usable = self.footprint.ffn_weights / 1e9, (limit - RESERVED) / 1e9
            expected = "expected more GPUs, to leave room for FFN weights: "
            expected += f"{size:.4g} GB on each, of {usable:.4g} GB that are usable"
            raise BadInput(expected, field="step_time.ffn_gpus", value=self.shape.ffn_gpus)
        return self.shape.attention_instances * self.instance_tokens(gpu_memory_utilization)

    # -- the bundle --------------------------------------------------------------------------------------------------

    def instance_tokens(self, gpu_memory_utilization: float = 0.9) -> float:
        """Tokens that the KV cache of one attention instance holds beside its weights; 0 if these do not fit."""
        free = self.hardware.memory_capacity * gpu_memory_utilization - self.footprint.attention_weights - RESERVED
        return max(free, 0.0) / self.footprint.kv_bytes_per_token

    @cached_property
    def footprint(self) -> Footprint:
        """Bytes on each GPU."""
        precision: Precision = "bf16" if self.weights == "bf16" else "fp8"
        deployment = Deployment(ffn_cards=self.shape.ffn_gpus, precision=precision, kv_bytes=CACHE_BYTES[self.cache])
        return footprint(self.model, deployment)

    def _bounds(self, decodes: int) -> Bounds:
        """Lower bounds of a step, each a line over the cached tokens of all sequences; the largest is exact."""
        if decodes in self._known:
            return self._known[decodes]
        shape, stages = self.shape, self.stages
        flying = min(shape.microbatches, decodes)
        sequences = decodes / flying / shape.attention_instances
        # Fewer sequences than instances: the fullest instance has one.
        fullest = self._fullest / math.sqrt(max(sequences, 1.0)) + max(1.0 / sequences, 1.0)
        fixed, token, minimum = stages.attention(sequences)
        token *= fullest / (shape.attention_instances * flying)
        ffn, exchange = stages.ffn(decodes / flying / shape.ffn_instances), stages.exchange(sequences)
        head, host = stages.head(sequences), stages.host(sequences)
        scale, layers = self.scale, self.model.layers
        ring = flying * layers * max(ffn, exchange / 2), flying * (layers * minimum + head)
        self._known[decodes] = (
            (scale * flying * (layers * fixed + head), scale * flying * layers * token),
            (scale * (layers * (fixed + ffn + exchange) + head + host), scale * layers * token),
            scale * max(*ring, layers * (minimum + ffn + exchange) + head + host),
        )
        return self._known[decodes]


def expected_largest(count: int) -> float:
    """The mean of the largest of this many standard normal numbers: 0 for one, 0.56 for two."""
    if count == 1:
        return 0.0
    import numpy as np  # slow to import, as the next, and only bundles need them
    from scipy.special import ndtri

    levels = (np.arange(4096) + 0.5) / 4096
    return float(np.mean(ndtri(levels ** (1 / count))))


@register
class AfdBundleSpec(SourceSpec):
    """An AFD bundle as one decode engine: x attention instances of a GPU, y FFN instances of `ffn_gpus`, m
    microbatches.

    `weights`: format of all weights; default: as published. `link`: default: intra_node while the bundle fits in a
    node. `max_model_len`: tokens of the longest request. `calibration`: α and β lines, in seconds, in place of data
    sheets.
    """

    source: Literal["afd_bundle"]
    model: NameOrFile
    hardware: NameOrFile
    attention_instances: PositiveInt = 1
    ffn_instances: PositiveInt = 1
    ffn_gpus: PositiveInt = 1
    microbatches: PositiveInt = 2
    weights: Weights | None = None
    cache: Cache = "bf16"
    link: Literal["intra_node", "inter_node"] | None = None
    context_cv: NonNegativeFloat = 0.0
    max_model_len: NonNegativeInt = 0
    calibration: NameOrFile | None = None

    def build(self, base: Path) -> StepTime:
        from latency_models.deployment.hugging_face import any_model

        model, hardware = any_model(self.model, base), load_hardware(self.hardware, base)
        weights = self._weights(model, hardware)
        shape = Shape(self.attention_instances, self.ffn_instances, self.ffn_gpus, self.microbatches)
        stages = self._stages(model, hardware, weights, shape.gpus, base)
        step_time = BundleStepTime(model, hardware, shape, stages, weights, self.cache, self.context_cv)
        if step_time.instance_tokens() < self.max_model_len:
            room = f"a KV cache of {self.max_model_len:,} tokens, found {step_time.instance_tokens():,.0f}"
            expected = f"expected attention instances whose weights leave room for {room}"
            raise BadInput(expected, field="step_time.max_model_len", value=self.max_model_len)
        return step_time

    def provenance(self) -> dict[str, Any]:
        shape = {"bundle": f"{self.attention_instances}A-{self.ffn_instances}F"}
        return super().provenance() | shape | ({"calibration": self.calibration} if self.calibration else {})

    def check_ranks(self, data_parallel: int) -> None:
        if data_parallel != 1:
            expected = "expected 1: the attention instances of a bundle are within its step times"
            raise BadInput(expected, field="engine.data_parallel_size", value=data_parallel)

    def _weights(self, model: Model, hardware: Hardware) -> Weights:
        model.check_layers_alike()
        if model.windowed_layers:
            expected = f"expected a model without sliding windows, {model.name} has them: no AFD step times"
            raise BadInput(expected, field="step_time.model", value=self.model)
        formats = model.formats(self.weights)
        weights = formats.experts if isinstance(model.ffn, ExpertFFN) else formats.linear
        if weights in ("fp4", "mxfp4", "int8", "int4") or COMPUTED_IN[weights] not in hardware.peak_flops:
            choices = [name for name in ("bf16", "fp8") if name in hardware.peak_flops]
            expected = f"expected {' or '.join(choices)} on {hardware.name}"
            raise BadInput(expected, field="step_time.weights", value=weights)
        if isinstance(model.ffn, ExpertFFN) and self.ffn_gpus > model.ffn.experts:
            expected = f"expected at most one GPU for each of the {model.ffn.experts} experts"
            raise BadInput(expected, field="step_time.ffn_gpus", value=self.ffn_gpus)
        return weights

    def _stages(
        self, model: Model, hardware: Hardware, weights: Weights, gpus: int, base: Path
    ) -> DataSheetStages | CalibratedStages:
        if self.calibration is not None:
            path = find_data("calibrations", self.calibration, base)
            lines = checked(Calibration, read_yaml(path), path)
            if lines.time_unit != "seconds":
                expected = f"expected a calibration in seconds, {lines.name} is in {lines.time_unit}"
                raise BadInput(expected, field="step_time.calibration", value=self.calibration)
            step = lines.step_line
            return CalibratedStages(PassLatency(step("attention"), step("ffn"), step("communication")), model.layers)
        inside = self.link == "intra_node" or (self.link is None and gpus <= hardware.devices_per_node)
        link = hardware.network.intra_node if inside else hardware.network.inter_node
        ratio = self.attention_instances / self.ffn_instances
        return DataSheetStages(model, hardware, self.ffn_gpus, ratio, weights, self.cache, link, Measured())
