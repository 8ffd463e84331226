"""FastAFD: measured tables, and the stages of a layer in bundles and in wide expert parallelism.

The measured tables: steps of FastAFD bundles over the ratio, and throughput of whole systems.

The tables are not part of this repository. `--data` names the folder that holds them.

Seconds of one layer's stages, and the decode step that two alternating microbatches make of them.

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

vLLM with data-parallel attention and experts over all N GPUs (DP = EP), and its KV ceiling.

No microbatches alternate, so the stages of a layer follow each other on every GPU: the attention stage and the rows of
the bundle, E/N experts, one message to each of the other GPUs, the way there and back, and a fixed overhead of a layer
that is fitted. On the same GPUs AFD and wide EP are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latency_models.deployment.hardware import WEIGHT_BYTES, Deployment, Hardware, footprint
from latency_models.deployment.models import ExpertFFN, Model
from latency_models.io.files import read_columns
from reports.blocks import Document
from workloads.errors import BadInput

RATIO_SWEEP, SYSTEMS = "ratio_sweep.csv", "systems.csv"
TRAY = 4
"""GPUs of one tray of GB200 NVL72: of the FFN, and of each attention tray."""

BUNDLE = re.compile(r"^afd-(\d+)-1$")
WIDE_EP = "vllm-dp-ep"


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """One measured decode step (seconds) of a bundle of one FFN tray and r attention trays, `batch_size` a GPU."""

    prompt_tokens: int
    batch_size: int
    ratio: float
    tpot: float

    @property
    def curve(self) -> tuple[int, int]:
        """Prompt length and batch size, which the points of one curve over r have in common."""
        return self.prompt_tokens, self.batch_size


@dataclass(frozen=True, slots=True)
class SystemMeasurement:
    """Measured output tokens a second and GPU of vLLM with DP = EP (ratio None), or a bundle with `ratio` attention
    trays.
    """

    model: str
    prompt_tokens: int
    gpus: int
    batch_size: int
    ratio: int | None
    throughput: float
    ceiling: bool

    @property
    def tpot(self) -> float:
        """Seconds of one decode step, from the throughput of all GPUs."""
        decoding = self.gpus if self.ratio is None else self.gpus - TRAY
        return self.batch_size * decoding / (self.throughput * self.gpus)


def read_ratio_sweep(folder: Path) -> list[StepMeasurement]:
    """The measured steps of `ratio_sweep.csv`, in its order; columns beside those read here are ignored."""
    columns = read_columns(folder / RATIO_SWEEP)
    rows = [
        StepMeasurement(prompt, batch, ratio, milliseconds / 1e3)
        for prompt, batch, ratio, milliseconds in zip(
            columns.wholes("prompt_tokens", low=1),
            columns.wholes("batch_per_attention_gpu", low=1),
            columns.numbers("attention_trays_per_ffn_tray", above=0),
            columns.numbers("tpot_ms", above=0),
            strict=True,
        )
    ]
    points = set()
    for index, row in enumerate(rows):
        point = (*row.curve, row.ratio)
        if point in points:
            expected = "expected each ratio once for a prompt length and batch"
            raise columns.fault(expected, index, "attention_trays_per_ffn_tray")
        points.add(point)
    return rows


def read_systems(folder: Path) -> list[SystemMeasurement]:
    """The systems of `systems.csv`, if the folder has it; `note` says where a batch is below the KV ceiling."""
    if not (folder / SYSTEMS).is_file():
        return []
    columns = read_columns(folder / SYSTEMS)
    gpus = columns.wholes("gpus", low=1)
    ratios = []
    for index, name in enumerate(columns.text("system")):
        bundle = BUNDLE.match(name)
        if bundle is None and name != WIDE_EP:
            raise columns.fault(f"expected {WIDE_EP} or a bundle such as afd-7-1", index, "system")
        ratio = int(bundle.group(1)) if bundle else None
        if ratio is not None and gpus[index] != TRAY * (ratio + 1):
            raise columns.fault(f"expected {TRAY * (ratio + 1)}, the GPUs of {name}", index, "gpus")
        ratios.append(ratio)
    ceilings = ["below the KV ceiling" not in note for note in columns.text("note")]
    prompts, batches = (columns.wholes(name, low=1) for name in ("prompt_tokens", "batch_per_gpu"))
    rates = columns.numbers("output_tokens_per_second_per_gpu", above=0)
    rows = zip(columns.text("model"), prompts, gpus, batches, ratios, rates, ceilings, strict=True)
    return [SystemMeasurement(*row) for row in rows]


def curves(rows: list[StepMeasurement]) -> dict[tuple[int, int], list[StepMeasurement]]:
    """The measured curves by prompt length and batch size, each in ascending ratio."""
    by_curve: dict[tuple[int, int], list[StepMeasurement]] = {}
    for row in sorted(rows, key=lambda row: (*row.curve, row.ratio)):
        by_curve.setdefault(row.curve, []).append(row)
    return by_curve


def require_folder(folder: Path | None) -> Path:
    """The folder of `--data`, which holds `ratio_sweep.csv`."""
    if folder is None:
        raise BadInput(f"expected a folder with {RATIO_SWEEP}, which is not part of the project", field="--data")
    if not (folder / RATIO_SWEEP).is_file():
        raise BadInput(f"expected a folder with {RATIO_SWEEP}", field="--data", value=str(folder))
    return folder


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


class PredictedStep(NamedTuple):
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
    """By the fields of `BundleParameters`, in their order."""
    return {
        "sequence_seconds": Prior(1e-6, 1.0, "the order of a kernel's fixed part; hardly known"),
        "row_efficiency": Prior(stages.hardware.efficiency.compute, 0.3, "the hardware file's share of peak FLOP/s"),
        "tray_seconds": Prior(2e-6, 0.5, "half a microsecond for each GPU of a tray"),
        "exchange_seconds": Prior(39e-6, 1.5, "reported dispatch and combine calls, 17 and 22 µs; hidden in part"),
    }


def fit_bundle(stages: LayerStages, measured: Sequence[StepMeasurement]) -> BundleParameters:
    """Fit the parameters to measured steps; without any, they are the medians of the prior."""
    from scipy.optimize import least_squares

    expected = priors(stages).values()
    medians, spreads = np.log([prior.median for prior in expected]), np.array([prior.spread for prior in expected])

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


UTILIZATION = 0.9
"""vLLM's gpu_memory_utilization."""

RESERVE = 4e9
"""Bytes of activations, CUDA graphs and communication buffers on a GPU, assumed. With them the predicted ceilings of
8,192-token prompts are vLLM's reported ones to one sequence."""


@dataclass(frozen=True, slots=True)
class WideEp:
    """A wide-EP system, predicted with a bundle's parameters and `overhead`, seconds of a layer beside the stages."""

    stages: LayerStages
    parameters: BundleParameters
    overhead: float = 0.0

    def tpot(self, gpus: int, prompt_tokens: int, batch_size: int) -> float:
        """Seconds of a decode step with `batch_size` sequences on each of `gpus`."""
        tokens = gpus * batch_size
        stages, fitted = self.stages, self.parameters
        layer = (
            stages.attention(fitted, batch_size, prompt_tokens)
            + stages.expert_read(tokens, gpus)
            + stages.rows(tokens, gpus, fitted.row_efficiency)
            + fitted.tray_seconds / TRAY * (gpus - 1)
            + fitted.exchange_seconds
            + self.overhead
        )
        return layer * stages.model.layers

    def kv_ceiling(self, gpus: int, prompt_tokens: int) -> int:
        """Sequences of so many tokens that the KV cache of one GPU holds."""
        memory = footprint(self.stages.model, Deployment(ffn_cards=gpus, precision=PRECISION, kv_bytes=KV_BYTES))
        # A checkpoint in 8 bits keeps embeddings and output head in 16.
        weights = memory.attention_weights + memory.ffn_weights + self.stages.model.embedding_parameters
        free = self.stages.hardware.memory_capacity * UTILIZATION - weights - RESERVE
        return max(int(free / memory.kv_bytes_per_token / prompt_tokens), 0)


def fit_overhead(stages: LayerStages, parameters: BundleParameters, measured: Sequence[SystemMeasurement]) -> float:
    """Seconds of a layer that measured steps of wide EP take beyond the stages, on average."""
    bare = WideEp(stages, parameters)
    missing = [row.tpot - bare.tpot(row.gpus, row.prompt_tokens, row.batch_size) for row in measured]
    return fmean(missing) / stages.model.layers


PROMPTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
GPUS = (8, 16, 24, 32, 48, 64, 72)
"""Whole trays of one NVL72 rack."""

BUNDLE_KV_TOKENS = 839_400
"""Tokens that an attention GPU of the measured bundles holds, as reported for Qwen3-235B-A22B."""


def compare_layouts(wide_ep: WideEp) -> list[Document]:
    """One entry a prompt length: both layouts at every number of GPUs, each with all sequences that its cache holds."""
    comparison = []
    for prompt in PROMPTS:
        rows = [_at(wide_ep, prompt, gpus) for gpus in GPUS]
        best = {name: max(rows, key=_throughput_of(name)) for name in ("afd", "wide_ep")}
        entry = {"prompt_tokens": prompt, "rows": rows, "afd_ahead": [row["gpus"] for row in rows if row["gain"] > 0]}
        entry |= {f"best_{name}": {"gpus": row["gpus"], **row[name]} for name, row in best.items()}
        entry["gain_of_best"] = best["afd"]["afd"]["throughput"] / best["wide_ep"]["wide_ep"]["throughput"] - 1
        comparison.append(entry)
    return comparison


def _throughput_of(layout: str) -> Callable[[Document], float]:
    return lambda row: float(row[layout]["throughput"])


def _at(wide_ep: WideEp, prompt_tokens: int, gpus: int) -> Document:
    """Both layouts on this many GPUs: a bundle of one FFN tray, and vLLM over all."""
    ratio = gpus // TRAY - 1
    bundle_batch = max(BUNDLE_KV_TOKENS // prompt_tokens // MICROBATCHES * MICROBATCHES, 1)
    bundle = predict_step(wide_ep.stages, wide_ep.parameters, prompt_tokens, bundle_batch, ratio).tpot
    batch = max(wide_ep.kv_ceiling(gpus, prompt_tokens), 1)
    wide = wide_ep.tpot(gpus, prompt_tokens, batch)
    afd = {"ratio": ratio, "batch_size": bundle_batch, "tpot_ms": 1e3 * bundle}
    afd["throughput"] = throughput_per_gpu(bundle_batch, ratio, bundle)
    alone = {"batch_size": batch, "tpot_ms": 1e3 * wide, "throughput": batch / wide}
    return {"gpus": gpus, "afd": afd, "wide_ep": alone, "gain": afd["throughput"] / alone["throughput"] - 1}
