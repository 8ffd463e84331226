"""Kernel timings, as aiconfigurator publishes them for a device, a backend and its version.

Each table has kernels timed one by one, in milliseconds; here times are in seconds. Heads are those of one rank. 16-bit
formats are called float16, whichever of the two a table names: kernels take the same time with both. Tables of modules
time a whole layer of latent or sparse attention, projections included. Those of linear attention time the convolution
and the recurrence apart, and projections are among the GEMMs. `data/kernel_tables/aiconfigurator/SOURCE.txt` describes
the columns, `layout.py` the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from latency_models.deployment.models import LatentAttention, LinearAttention, Model, load_model
from latency_models.interpolation import Curve, Surface, bracket, weighted_sum
from latency_models.io.config_io import read_yaml
from latency_models.io.files import Columns, read_columns
from latency_models.sources.aiconfigurator.layout import TableFiles, flat_tables
from latency_models.sources.registry import AICONFIGURATOR, other_source
from latency_models.step_time import Origin
from workloads.errors import BadInput

BALANCED = "power_law_1.01"
"""The more even of the two ways in which the MoE tables spread tokens over experts."""

CONVOLUTION = "causal_conv1d"
"""The begin of the names of convolutions. The other kernels are recurrences; the fastest of a shape counts."""

HOST_BOUND = {("kda", "context")}
"""Recurrences beside convolutions whose timings are mostly the host's, and are left out."""

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """Memory of the device, from the system file beside the tables: bytes/s, bytes, and bytes reserved."""

    memory_bandwidth: float
    memory_capacity: float
    reserved: float


class AttentionKind(NamedTuple):
    """The kind of an attention kernel: its formats, the heads of one rank, and its window (0: none)."""

    compute: str
    cache: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0


class ModuleKind(NamedTuple):
    """The kind of a layer of latent attention: its shape but for heads, the heads of one rank, and formats."""

    shape: Shape
    heads: int
    cache: str
    weights: str


class ExpertKind(NamedTuple):
    """The kind of an MoE kernel. `intermediate_size` is that of a whole expert."""

    weights: str
    hidden_size: int
    intermediate_size: int
    experts_per_token: int
    experts: int
    tensor_parallel: int
    expert_parallel: int
    load: str = BALANCED


def module_shape(model: Model) -> Shape:
    """The sizes of a layer of latent attention, but for its heads; an indexer's are 0 where there is none."""
    mla = model.attention
    assert isinstance(mla, LatentAttention)
    indexer = mla.indexer
    sizes = (mla.q_compressed, mla.kv_compressed, mla.rope_dim, mla.nope_dim, mla.value_dim)
    return (model.hidden_size, *sizes, *((indexer.heads, indexer.head_dim, indexer.top_k) if indexer else (0, 0, 0)))


def state_shape(linear: LinearAttention, width: int) -> Shape:
    """Heads of one of `width` ranks, and sizes of keys and values."""
    return (linear.key_heads // width, linear.value_heads // width, linear.key_dim, linear.value_dim)


@dataclass(frozen=True, slots=True)
class KernelTables:
    """The timings of one folder, seconds, by the name of their table and by kind; `device`: None without a system file.

    Tables of GEMMs: by weight format and (n, k), curves over rows m. Of prompts: curves over the tokens of one, nothing
    cached. Of decodes: surfaces over sequences and the cached tokens of each. Of linear attention: both, as curves. Of
    experts: curves of an MoE layer on one rank over the tokens that its ranks serve together. Of all-reduces: by
    devices, over elements of two bytes.
    """

    folder: Path
    tables: Mapping[str, Mapping[Any, Any]]
    device: Device | None = None
    origin: Origin = field(default_factory=Origin)
    notes: tuple[str, ...] = ()

    def find(self, table: str, key: Hashable, name: str = "") -> Any:
        """The timings of one kind; `name`: of the field in the error, if it is not the table's."""
        kinds = self.tables.get(table, {})
        if key not in kinds:
            names = sorted(map(str, kinds))
            text = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            file = _file(self.folder, table)
            raise BadInput(f"expected one of {text or 'none'}", field=name or table, value=key, file=file)
        return kinds[key]

    def gemm(self, weights: str, n: int, k: int) -> tuple[Curve, bool]:
        """Seconds of a GEMM by its rows, and whether its shape was measured, not a straight line between others."""
        shapes: Mapping[tuple[int, int], Curve] = self.find("gemm", weights, "weights")
        corners = [
            (n_weight * k_weight, shapes[near_n, near_k])
            for near_n, n_weight in _neighbours({shape[0] for shape in shapes}, n)
            for near_k, k_weight in _neighbours({shape[1] for shape in shapes}, k)
            if (near_n, near_k) in shapes
        ]
        if not corners:
            raise BadInput("expected a shape near those measured", field="gemm", value=(n, k), file=self.folder)
        return weighted_sum(corners), (n, k) in shapes

    def states(self, linear: LinearAttention, width: int) -> tuple[Curve, Curve]:
        """Seconds of linear attention in one layer: of one prompt by its tokens, and of decodes by their number."""
        if not self.tables.get(linear.kind):
            expected = f"expected the recurrence of {linear.kind}, of which these tables have no timings"
            raise BadInput(expected, field=linear.kind, file=_file(self.folder, linear.kind))
        times: tuple[Curve, Curve] = self.find(linear.kind, state_shape(linear, width))
        return times


def read_tables(source: Path | TableFiles) -> KernelTables:
    """Read a folder of tables, or those that were found. Those of GEMMs and of grouped queries must be there."""
    files = flat_tables(source) if isinstance(source, Path) else source
    folder = files.folder
    if files.path("gemm") is None and folder.is_dir():
        name = _file(folder, "gemm").name
        expected = f"expected a file gemm_perf.parquet, gemm_perf.txt or {name}{other_source(folder, AICONFIGURATOR)}"
        raise BadInput(expected, file=folder)
    required = ("gemm", "context_attention", "generation_attention")
    paths = {name: _file(folder, name) for name in required} | dict(files.files)
    columns = {name: read_columns(path) for name, path in paths.items() if name in READERS}
    gemms = columns["gemm"]
    return KernelTables(
        folder=folder,
        tables={name: READERS[name](table) for name, table in columns.items()},
        device=_read_device(files.system_file),
        origin=Origin(_single(gemms, "device"), _single(gemms, "framework").lower(), _single(gemms, "version")),
        notes=files.notes,
    )


def _file(folder: Path, name: str) -> Path:
    """A table's file, gzipped or not; the gzipped one where neither is there."""
    plain = folder / f"{name}_perf.txt"
    return plain if plain.is_file() else folder / f"{name}_perf.txt.gz"


def _wholes(table: Columns, *names: str) -> Iterator[list[int]]:
    return (table.wholes(name, low=1) for name in names)


def _formats(table: Columns, *names: str) -> Iterator[list[str]]:
    return (["float16" if text == "bfloat16" else text for text in table.text(name)] for name in names)


def _latency(table: Columns) -> list[float]:
    return [milliseconds * 1e-3 for milliseconds in table.numbers("latency", above=0.0)]


def _single(table: Columns, name: str) -> str:
    values = set(table.text(name)) if name in table.names else set()
    return values.pop().strip() if len(values) == 1 else ""


def _curves(rows: Iterable[tuple[Hashable, float, float]]) -> dict[Any, Curve]:
    """Curves by kind, of rows (kind, size, seconds)."""
    points: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for kind, size, seconds in rows:
        points[kind].append((size, seconds))
    return {kind: Curve(sizes) for kind, sizes in points.items()}


def _gemms(table: Columns) -> dict[str, dict[tuple[int, int], Curve]]:
    (formats,), (m, n, k) = _formats(table, "gemm_dtype"), _wholes(table, "m", "n", "k")
    curves = _curves(zip(zip(formats, n, k, strict=True), m, _latency(table), strict=True))
    shapes: dict[str, dict[tuple[int, int], Curve]] = defaultdict(dict)
    for (weights, columns, inner), curve in curves.items():
        shapes[weights][columns, inner] = curve
    return dict(shapes)


def _experts(table: Columns) -> dict[ExpertKind, Curve]:
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    kinds = map(ExpertKind, *_formats(table, "moe_dtype"), *_wholes(table, *names), table.text("distribution"))
    return _curves(zip(kinds, table.wholes("num_tokens", low=1), _latency(table), strict=True))


def _all_reduces(table: Columns) -> dict[int, Curve]:
    """All-reduces inside a CUDA graph, where eager ones were timed too."""
    how = table.text("backend") if "backend" in table.names else [""] * len(table)
    rows = zip(how, table.wholes("num_gpus", low=2), table.wholes("message_size", low=1), _latency(table), strict=True)
    return _curves((ranks, float(size), time) for backend, ranks, size, time in rows if not backend.endswith("eager"))


def _attention_kinds(table: Columns) -> list[AttentionKind]:
    counts = _wholes(table, "num_heads", "num_key_value_heads", "head_dim")
    windows = table.wholes("window_size", low=0) if "window_size" in table.names else [0] * len(table)
    return list(map(AttentionKind, *_formats(table, "attn_dtype", "kv_cache_dtype"), *counts, windows))


def _module_kinds(table: Columns) -> list[ModuleKind | None]:
    """The kind of each row; None for layers of models that no model file describes."""
    shapes: dict[str, Shape] = {}
    models = table.text("model")
    for name in set(models):
        try:
            shapes[name] = module_shape(load_model(name))
        except BadInput:
            continue
    rows = zip(models, *_wholes(table, "num_heads"), *_formats(table, "kv_cache_dtype", "gemm_type"), strict=True)
    return [
        ModuleKind(shapes[model], heads, cache, weights) if model in shapes else None
        for model, heads, cache, weights in rows
    ]


def _sequences(
    kinds: Callable[[Columns], Iterable[Hashable]], table: Columns
) -> Iterator[tuple[Hashable, int, int, int, float]]:
    """Rows (kind, sequences, new tokens and cached tokens of each, seconds) of the kinds that are known."""
    sizes = (*_wholes(table, "batch_size", "isl"), table.wholes("step", low=0))
    return (row for row in zip(kinds(table), *sizes, _latency(table), strict=True) if row[0] is not None)


def _prompts(kinds: Callable[[Columns], Iterable[Hashable]], table: Columns) -> dict[Any, Curve]:
    """Attention of single prompts without cached tokens. Batches of equal prompts are ignored."""
    rows = _sequences(kinds, table)
    return _curves(
        (kind, float(tokens), seconds) for kind, batch, tokens, cached, seconds in rows if (batch, cached) == (1, 0)
    )


def _decodes(kinds: Callable[[Columns], Iterable[Hashable]], table: Columns) -> dict[Any, Surface]:
    """Attention of decodes. Cached tokens of each sequence are `isl` + `step`, its new one included."""
    rows = _sequences(kinds, table)
    curves = _curves(((kind, count), float(isl + step), seconds) for kind, count, isl, step, seconds in rows)
    by_count: dict[Any, dict[int, Curve]] = defaultdict(dict)
    for (kind, count), curve in curves.items():
        by_count[kind][count] = curve
    return {kind: Surface(surface) for kind, surface in by_count.items()}


def recurrent_layers(table: Columns) -> dict[str, dict[tuple[int, int, Shape], float]]:
    """Seconds by phase, then by sequences, tokens of each and shape: convolution and recurrence together.

    Shapes without a recurrence are left out: all of Mamba-2's, whose tables time the convolution alone.
    """
    name, columns = table.text("op_name")[0], ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    if any(column not in table.names for column in columns):
        return {}
    shapes = zip(*_wholes(table, *columns), strict=True)
    sizes = zip(*_wholes(table, "batch_size", "seq_len"), shapes, strict=True)
    kernels: dict[tuple[str, tuple[int, int, Shape]], dict[str, float]] = defaultdict(dict)
    rows = zip(table.text("phase"), sizes, table.text("kernel_source"), table.numbers("latency"), strict=True)
    for phase, size, kernel, milliseconds in rows:
        kernels[phase, size][kernel] = milliseconds * 1e-3
    layers: dict[str, dict[tuple[int, int, Shape], float]] = defaultdict(dict)
    for (phase, size), parts in kernels.items():
        recurrences = [seconds for kernel, seconds in parts.items() if not kernel.startswith(CONVOLUTION)]
        convolutions = [seconds for kernel, seconds in parts.items() if kernel.startswith(CONVOLUTION)]
        if recurrences and convolutions:
            first = 0.0 if (name, phase) in HOST_BOUND else min(convolutions)
            layers[phase][size] = first + min(recurrences)
    return dict(layers)


def _states(table: Columns) -> dict[Shape, tuple[Curve, Curve]]:
    layers = recurrent_layers(table)
    sized = {phase: layers.get(phase, {}).items() for phase in ("context", "generation")}
    prompts = _curves((shape, tokens, seconds) for (batch, tokens, shape), seconds in sized["context"] if batch == 1)
    # Decodes of any length cost the same; the last row of a number of them counts.
    latest = {(shape, batch): seconds for (batch, _, shape), seconds in sized["generation"]}
    decodes = _curves((shape, batch, seconds) for (shape, batch), seconds in latest.items())
    return {shape: (curve, decodes[shape]) for shape, curve in prompts.items() if shape in decodes}


READERS: Mapping[str, Callable[[Columns], Mapping[Any, Any]]] = {
    "gemm": _gemms,
    "context_attention": partial(_prompts, _attention_kinds),
    "generation_attention": partial(_decodes, _attention_kinds),
    "moe": _experts,
    "custom_allreduce": _all_reduces,
    "mla_context_module": partial(_prompts, _module_kinds),
    "mla_generation_module": partial(_decodes, _module_kinds),
    "dsa_context_module": partial(_prompts, _module_kinds),
    "dsa_generation_module": partial(_decodes, _module_kinds),
    "gdn": _states,
    "kda": _states,
    "mamba2": _states,
}
"""The tables of which step times are composed."""


def _read_device(path: Path | None) -> Device | None:
    if path is None:
        return None
    document = read_yaml(path)
    numbers = []
    for section, name in (("gpu", "mem_bw"), ("gpu", "mem_capacity"), ("misc", "other_mem")):
        part = document.get(section)
        value = part.get(name) if isinstance(part, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise BadInput("expected a number above 0", value=value, field=f"{section}.{name}", file=path)
        numbers.append(float(value))
    return Device(*numbers)


def _neighbours(grid: Collection[int], size: int) -> list[tuple[int, float]]:
    """Measured sizes around a size, with their weights; beyond the largest, that one in proportion."""
    sizes = sorted(grid)
    if size <= sizes[0]:
        return [(sizes[0], 1.0)]
    if size >= sizes[-1]:
        return [(sizes[-1], size / sizes[-1])]
    i, share = bracket(sizes, size)
    return [(sizes[i], 1 - share), (sizes[i + 1], share)] if share else [(sizes[i], 1.0)]
