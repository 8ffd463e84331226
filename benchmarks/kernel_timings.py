"""Timings of kernels with their FLOPs and bytes, from tables of aiconfigurator and of LLMServingSim's profiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latency_models.deployment.hardware import Hardware
from latency_models.deployment.models import Model
from latency_models.fitting.estimator import Floats
from latency_models.io.files import Columns, read_columns
from latency_models.sources.aiconfigurator.layout import TableFiles
from latency_models.sources.roofline.efficiency import Kind, all_reduce_kind
from latency_models.sources.roofline.placement import COMPUTED_IN, WEIGHT_BYTES, Placement, Weights
from latency_models.sources.roofline.work import SMALL_KERNELS, elementwise_bytes

Wholes = NDArray[np.int64]

FORMATS: dict[str, Weights] = {
    "bfloat16": "bf16", "float16": "bf16", "fp8": "fp8", "nvfp4": "fp4", "w4a16_mxfp4": "mxfp4",
}  # fmt: skip
"""Formats of linear layers as the tables name them. Block-wise FP8 is left out: on several devices its timings contain
the time to choose a kernel."""

EXPERT_FORMATS: dict[Weights, tuple[str, ...]] = {
    "bf16": ("bfloat16", "float16"),
    "fp8": ("fp8_block",),
    "fp4": ("nvfp4",),
    "mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "int4": ("int4_wo",),
}
"""Names in the tables by formats of experts, of which the first that a table has counts: engines multiply MXFP4 by FP8
where they can. Published checkpoints in FP8 are scaled block by block, so that these timings stand for FP8."""

LEAST_ROWS, MOST_ROWS = 1, 16384
LEAST_SIZE = 512
"""Rows, and columns and inner sizes, of linear layers from which they are fitted."""


@dataclass(frozen=True)
class Timings:
    """Kernels of one kind on one device.

    Attributes:
        flops, size, seconds: FLOPs, bytes, and time of each kernel; peak, bandwidth: the device's, per second.
        padding: bytes of one more cached token of each sequence; 0 where that means nothing. devices: of an all-reduce.
        shape: a number for the kernel's shape, the same whatever its rows.
    """

    kind: Kind
    device: str
    source: str
    flops: Floats
    size: Floats
    seconds: Floats
    padding: Floats
    devices: Floats
    shape: Wholes
    peak: float
    bandwidth: float

    def __len__(self) -> int:
        return len(self.seconds)


def table_timings(files: TableFiles, hardware: Hardware) -> list[Timings]:
    """The timings of aiconfigurator's tables of one engine on a device."""
    results: list[Timings] = []
    readers = {
        "gemm": _linear,
        "moe": _experts,
        "context_attention": _prompts,
        "generation_attention": _decodes,
        "context_mla": _latent_prompts,
        "generation_mla": _latent_decodes,
        "custom_allreduce": _all_reduce,
    }
    for table, reader in readers.items():
        path = files.path(table)
        if path is not None:
            results += reader(read_columns(path), hardware)
    return [timings for timings in results if len(timings)]


def elementwise_timings(folder: Path, model: Model, hardware: Hardware) -> Timings:
    """The elementwise kernels of a layer of `model`, added up, from the profiler's table of them."""
    table = read_columns(folder / "dense.csv.gz")
    rows: dict[int, float] = {}
    weights = {"layernorm": 2, "rotary_emb": 1, "act_fn": 1}  # kernels of each in a layer
    columns = zip(table.text("layer"), table.wholes("tokens", low=1), table.numbers("time_us", above=0.0), strict=True)
    for name, count, microseconds in columns:
        if name in weights:
            rows[count] = rows.get(count, 0.0) + weights[name] * microseconds * 1e-6
    tokens, seconds = np.array(list(rows), dtype=np.int64), np.array(list(rows.values()), dtype=np.float64)
    # One kernel stands for the four, so that `launch` is that of one.
    size = tokens.astype(np.float64) * (elementwise_bytes(model, Placement()) / SMALL_KERNELS)
    return make_timings(
        "elementwise", hardware, f"kernels of {model.name}, vllm", 0 * size, size, seconds / SMALL_KERNELS,
        shape=tokens, cached=True,
    )  # fmt: skip


def make_timings(
    kind: Kind,
    hardware: Hardware,
    source: str,
    flops: Floats,
    size: Floats,
    seconds: Floats,
    *,
    padding: Floats | None = None,
    devices: Floats | None = None,
    shape: Wholes,
    weights: Weights = "bf16",
    bandwidth: float | None = None,
    cached: bool = False,
) -> Timings:
    """Timings, of which each is kept that is no faster than the memory: other kernels were timed in a cache.

    `cached`: the engine, too, finds their data in a cache, since the kernel before has just written it. All are kept.
    """
    bandwidth = bandwidth or hardware.memory_bandwidth
    mask = (size <= bandwidth * seconds) | cached
    none = np.zeros(len(seconds))
    arrays = (flops, size, seconds, none if padding is None else padding, none if devices is None else devices)
    flops, size, seconds, padding, devices = (np.asarray(array, dtype=np.float64)[mask] for array in arrays)
    peak = hardware.flops(COMPUTED_IN[weights])
    return Timings(kind, hardware.name, source, flops, size, seconds, padding, devices, shape[mask], peak, bandwidth)


def source_of(table: Columns) -> str:
    """The engine and version of a table's first row."""
    return f"{table.text('framework')[0].lower()} {table.text('version')[0]}"


def number_shapes(*columns: Floats) -> Wholes:
    """A number for each different row of some columns."""
    shape_index: Wholes = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return shape_index


def _numbers(table: Columns, *names: str) -> list[Floats]:
    return [np.array(table.numbers(name)) for name in names]


def _seconds(table: Columns) -> Floats:
    return np.array(table.numbers("latency", above=0.0)) * 1e-3


def _linear(table: Columns, hardware: Hardware) -> list[Timings]:
    rows, columns, inner = _numbers(table, "m", "n", "k")
    formats, seconds, results = np.array(table.text("gemm_dtype")), _seconds(table), []
    usual = (rows <= MOST_ROWS) & (columns >= LEAST_SIZE) & (inner >= LEAST_SIZE)
    for name, weights in FORMATS.items():
        here = usual & (formats == name)
        if weights == "mxfp4" or COMPUTED_IN[weights] not in hardware.peak_flops or not here.any():
            continue
        kind: Kind = {"bf16": "linear_bf16", "fp8": "linear_fp8", "fp4": "linear_fp4"}[weights]  # type: ignore[assignment]
        m, n, k = rows[here], columns[here], inner[here]
        size = n * k * WEIGHT_BYTES[weights] + m * (n + k) * 2.0
        results.append(
            make_timings(
                kind,
                hardware,
                source_of(table),
                2.0 * m * n * k,
                size,
                seconds[here],
                shape=number_shapes(n, k),
                weights=weights,
            )
        )
    return results


def _experts(table: Columns, hardware: Hardware) -> list[Timings]:
    """Experts whose use is almost even, each by the fastest kernel of its shape and rows, as engines choose it.

    Few rows reach fewer experts than evenly chosen ones would, and seem faster than the memory: all timings are kept.
    """
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    sizes = np.stack(_numbers(table, *names), axis=1)
    formats, seconds, results = np.array(table.text("moe_dtype")), _seconds(table), []
    even = np.array(table.text("distribution")) == "power_law_1.01"
    for weights, names_of in EXPERT_FORMATS.items():
        name = next((name for name in names_of if name in formats), "")
        here = even & (formats == name)
        if COMPUTED_IN[weights] not in hardware.peak_flops or not here.any():
            continue
        kernels, at = np.unique(sizes[here], axis=0, return_inverse=True)
        fastest = np.full(len(kernels), np.inf)
        np.minimum.at(fastest, at.reshape(-1), seconds[here])
        t, h, i, k, e, tp, ep = kernels.T
        one = 3 * h * i / tp
        touched = e / ep * (1 - (1 - k / e) ** t)
        results.append(
            make_timings(
                f"experts_{weights}",  # type: ignore[arg-type]  # names of formats
                hardware,
                source_of(table),
                2 * t * k / ep * one,
                touched * one * WEIGHT_BYTES[weights] + 4 * t * h,
                fastest,
                shape=number_shapes(h, i, k, e, tp, ep),
                weights=weights,
                cached=True,
            )
        )
    return results


def _attention_rows(table: Columns) -> tuple[NDArray[np.bool_], NDArray[np.str_]]:
    """Rows without a window, and the formats of their cache."""
    whole = np.array(table.numbers("window_size")) == 0 if "window_size" in table.names else np.ones(len(table), bool)
    return whole, np.array(table.text("kv_cache_dtype"))


def _prompts(table: Columns, hardware: Hardware) -> list[Timings]:
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim")
    count, tokens, cached, heads, kv_heads, width = _numbers(table, *names)
    (whole, formats), seconds, results = _attention_rows(table), _seconds(table), []
    for bits, element in (("bf16", 2.0), ("fp8", 1.0)):
        here = whole & np.isin(formats, [name for name, element_type in FORMATS.items() if element_type == bits])
        if not here.any():
            continue
        kind: Kind = f"prompt_attention_{bits}"  # type: ignore[assignment]
        b, t, c, h, kv, d = (column[here] for column in (count, tokens, cached, heads, kv_heads, width))
        flops = 4 * b * h * d * t * (c + (t + 1) / 2)
        size = b * ((c + t) * kv * 2 * d * element + 2 * t * h * d * 2.0)
        results.append(
            make_timings(kind, hardware, source_of(table), flops, size, seconds[here], shape=number_shapes(h, kv, d))
        )
    return results


def _decodes(table: Columns, hardware: Hardware) -> list[Timings]:
    names = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim")
    count, first, later, heads, kv_heads, width = _numbers(table, *names)
    (whole, formats), seconds, results = _attention_rows(table), _seconds(table), []
    for bits, element in (("bf16", 2.0), ("fp8", 1.0)):
        here = whole & np.isin(formats, [name for name, element_type in FORMATS.items() if element_type == bits])
        if not here.any():
            continue
        kind: Kind = f"decode_attention_{bits}"  # type: ignore[assignment]
        b, s, h, kv, d = (column[here] for column in (count, first + later, heads, kv_heads, width))
        token = 2 * kv * d * element
        timings = make_timings(
            kind, hardware, source_of(table), 4 * b * s * h * d, b * s * token, seconds[here],
            padding=b * token, shape=number_shapes(h, kv, d),
        )  # fmt: skip
        results.append(timings)
    return results


LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
"""Elements of DeepSeek-V3's compressed vector, its rotary key, and a head's other keys and values: in no table."""


def _latent_prompts(table: Columns, hardware: Hardware) -> list[Timings]:
    count, tokens, cached, heads = _numbers(table, "batch_size", "isl", "step", "num_heads")
    here = np.isin(table.text("kv_cache_dtype"), ("float16", "bfloat16"))
    b, t, c, h = (column[here] for column in (count, tokens, cached, heads))
    flops = 2 * b * h * (NOPE + ROPE + VALUE) * t * (c + (t + 1) / 2)
    size = b * ((c + t) * (LATENT + ROPE) * 2.0 + t * h * (NOPE + ROPE + VALUE) * 2.0)
    return [
        make_timings(
            "prompt_latent", hardware, source_of(table), flops, size, _seconds(table)[here], shape=number_shapes(h)
        )
    ]


def _latent_decodes(table: Columns, hardware: Hardware) -> list[Timings]:
    count, first, later, heads = _numbers(table, "batch_size", "isl", "step", "num_heads")
    here = np.isin(table.text("kv_cache_dtype"), ("float16", "bfloat16"))
    b, s, h = (column[here] for column in (count, first + later, heads))
    token = (LATENT + ROPE) * 2.0
    flops, size = 2 * b * s * h * (2 * LATENT + ROPE), b * s * token
    timings = make_timings(
        "decode_latent",
        hardware,
        source_of(table),
        flops,
        size,
        _seconds(table)[here],
        padding=b * token,
        shape=number_shapes(h),
    )
    return [timings]


def _all_reduce(table: Columns, hardware: Hardware) -> list[Timings]:
    """All-reduces inside a CUDA graph, of at most 2^26 elements: larger ones are no activations of a step."""
    devices, elements = _numbers(table, "num_gpus", "message_size")
    how = np.array(table.text("backend")) if "backend" in table.names else np.full(len(table), "")
    here = (np.char.find(how, "eager") < 0) & (elements <= 2**26) & (devices >= 2)
    n, size = devices[here], 2 * (devices[here] - 1) / devices[here] * elements[here] * 2.0
    link = hardware.network.intra_node
    return [
        make_timings(
            all_reduce_kind(hardware), hardware, source_of(table), 0 * n, size, _seconds(table)[here],
            devices=n, shape=number_shapes(n), bandwidth=link,
        )
    ]  # fmt: skip
