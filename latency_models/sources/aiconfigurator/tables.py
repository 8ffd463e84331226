"""Kernel timings, as aiconfigurator publishes them for a device, a backend and its version.

Each table has kernels timed one by one, in milliseconds; here times are in seconds. Heads are those of one rank. 16-bit
formats are called float16, whichever of the two a table names: kernels take the same time with both.
`data/kernel_tables/aiconfigurator/SOURCE.txt` describes the columns, `layout.py` the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from latency_models.interpolation import Curve, Surface, bracket, weighted_sum
from latency_models.io.config_io import read_yaml
from latency_models.io.files import Columns, read_columns
from latency_models.sources.aiconfigurator.layout import TableFiles, flat_tables
from latency_models.sources.aiconfigurator.sequence_tables import (
    MODULES,
    STATES,
    ModuleKind,
    SequenceTables,
    Shape,
    StateTimes,
    read_sequence_tables,
)
from latency_models.sources.registry import AICONFIGURATOR, other_source
from latency_models.step_time import Origin
from workloads.errors import BadInput

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

BALANCED = "power_law_1.01"
"""The more even of the two ways in which the MoE tables spread tokens over experts."""


@dataclass(frozen=True, slots=True)
class Device:
    """Memory of the device, from the system file beside the tables: bytes/s, bytes, and bytes reserved."""

    memory_bandwidth: float
    memory_capacity: float
    reserved: float


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The kind of an attention kernel: its formats, the heads of one rank, and its window (0: none)."""

    compute: str
    cache: str
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """The kind of an MoE kernel. `intermediate_size` is that of a whole expert."""

    weights: str
    hidden_size: int
    intermediate_size: int
    experts_per_token: int
    experts: int
    tensor_parallel: int
    expert_parallel: int
    load: str = BALANCED


@dataclass(frozen=True, slots=True)
class KernelTables:
    """The timings of one folder, seconds.

    `gemms`: by weight format, then by (n, k): seconds by rows m. `context`: one prompt's attention, nothing cached.
    `generation`: by sequences, and by the cached tokens of each. `experts`: a MoE layer's on one rank, by the tokens
    that its ranks serve together. `all_reduce`: by devices: seconds by elements of two bytes. `device`: None without a
    system file.
    """

    folder: Path
    gemms: Mapping[str, Mapping[tuple[int, int], Curve]]
    context: Mapping[AttentionKind, Curve]
    generation: Mapping[AttentionKind, Surface]
    experts: Mapping[ExpertKind, Curve] = field(default_factory=dict)
    all_reduce: Mapping[int, Curve] = field(default_factory=dict)
    sequence: SequenceTables = field(default_factory=SequenceTables)
    device: Device | None = None
    origin: Origin = field(default_factory=Origin)
    notes: tuple[str, ...] = ()

    def gemm(self, weights: str, n: int, k: int) -> tuple[Curve, bool]:
        """Seconds of a GEMM by its rows, and whether its shape was measured, not a straight line between others."""
        shapes = self._find(self.gemms, weights, "weights", "gemm")
        corners = [
            (n_weight * k_weight, shapes[near_n, near_k])
            for near_n, n_weight in _neighbours({shape[0] for shape in shapes}, n)
            for near_k, k_weight in _neighbours({shape[1] for shape in shapes}, k)
            if (near_n, near_k) in shapes
        ]
        if not corners:
            raise BadInput("expected a shape near those measured", field="gemm", value=(n, k), file=self.folder)
        return weighted_sum(corners), (n, k) in shapes

    def context_attention(self, kind: AttentionKind) -> Curve:
        """Seconds of one prompt's attention by its tokens."""
        return self._find(self.context, kind, "context_attention", "context_attention")

    def generation_attention(self, kind: AttentionKind) -> Surface:
        """Seconds of decode attention by sequences and by the cached tokens of each."""
        return self._find(self.generation, kind, "generation_attention", "generation_attention")

    def module(self, kind: ModuleKind, name: str) -> tuple[Curve, Surface]:
        """Seconds of a layer of latent (`mla`) or sparse (`dsa`) attention: of one prompt, and of decodes."""
        prompts, decodes = MODULES[name]
        context = self._find(self.sequence.context, kind, prompts, prompts)
        return context, self._find(self.sequence.generation, kind, decodes, decodes)

    def states(self, name: str, shape: Shape) -> StateTimes:
        """Seconds of linear attention in one layer."""
        if not any(known == name for known, _ in self.sequence.states):
            expected = f"expected the recurrence of {name}, of which these tables have no timings"
            raise BadInput(expected, field=name, file=_file(self.folder, STATES[name]))
        return self._find(self.sequence.states, (name, shape), name, STATES[name])

    def expert_layer(self, kind: ExpertKind) -> Curve:
        """Seconds of a layer's experts on one rank, by tokens."""
        return self._find(self.experts, kind, "moe", "moe")

    def reduction(self, devices: int) -> Curve:
        """Seconds of an all-reduce by its elements."""
        return self._find(self.all_reduce, devices, "devices", "custom_allreduce")

    def _find(self, table: Mapping[_Key, _Value], key: _Key, name: str, file: str) -> _Value:
        if key not in table:
            names = sorted(map(str, table))
            text = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            raise BadInput(f"expected one of {text or 'none'}", field=name, value=key, file=_file(self.folder, file))
        return table[key]


def read_tables(source: Path | TableFiles) -> KernelTables:
    """Read a folder of tables, or those that were found. Those of experts and of all-reduces may be missing."""
    files = flat_tables(source) if isinstance(source, Path) else source
    folder = files.folder
    if files.path("gemm") is None and folder.is_dir():
        name = _file(folder, "gemm").name
        expected = f"expected a file gemm_perf.parquet, gemm_perf.txt or {name}{other_source(folder, AICONFIGURATOR)}"
        raise BadInput(expected, file=folder)
    gemms = read_columns(_required(files, "gemm"))
    return KernelTables(
        folder=folder,
        gemms=_gemms(gemms),
        context=_read_context(_required(files, "context_attention")),
        generation=_read_generation(_required(files, "generation_attention")),
        experts=_read_experts(files.path("moe")),
        all_reduce=_read_all_reduce(files.path("custom_allreduce")),
        sequence=read_sequence_tables(files.files),
        device=_read_device(files.system_file),
        origin=Origin(_single(gemms, "device"), _single(gemms, "framework").lower(), _single(gemms, "version")),
        notes=files.notes,
    )


def _required(files: TableFiles, name: str) -> Path:
    """A table's file; where it is missing, a path whose reading says so."""
    return files.path(name) or _file(files.folder, name)


def _file(folder: Path, name: str) -> Path:
    """A table's file, gzipped or not; the gzipped one where neither is there."""
    plain = folder / f"{name}_perf.txt"
    return plain if plain.is_file() else folder / f"{name}_perf.txt.gz"


def _formats(table: Columns, name: str) -> list[str]:
    return ["float16" if text == "bfloat16" else text for text in table.text(name)]


def _latency(table: Columns) -> list[float]:
    return [milliseconds * 1e-3 for milliseconds in table.numbers("latency", above=0.0)]


def _grouped(keys: Iterator[_Key], points: Iterator[tuple[float, float]]) -> dict[_Key, Curve]:
    points_by_key: dict[_Key, list[tuple[float, float]]] = defaultdict(list)
    for key, point in zip(keys, points, strict=True):
        points_by_key[key].append(point)
    return {key: Curve(points) for key, points in points_by_key.items()}


def _single(table: Columns, name: str) -> str:
    values = set(table.text(name)) if name in table.names else set()
    return values.pop().strip() if len(values) == 1 else ""


def _gemms(table: Columns) -> dict[str, dict[tuple[int, int], Curve]]:
    m, n, k = (table.wholes(name, low=1) for name in ("m", "n", "k"))
    keys = zip(_formats(table, "gemm_dtype"), n, k, strict=True)
    shapes: dict[str, dict[tuple[int, int], Curve]] = defaultdict(dict)
    for (weights, columns, inner), curve in _grouped(keys, zip(m, _latency(table), strict=True)).items():
        shapes[weights][columns, inner] = curve
    return dict(shapes)


def _attention_kinds(table: Columns) -> list[AttentionKind]:
    counts = (table.wholes(name, low=1) for name in ("num_heads", "num_key_value_heads", "head_dim"))
    formats = (_formats(table, name) for name in ("attn_dtype", "kv_cache_dtype"))
    return list(map(AttentionKind, *formats, *counts, _windows(table)))


def _windows(table: Columns) -> list[int]:
    """The attention window of each row; 0 is none."""
    return table.wholes("window_size", low=0) if "window_size" in table.names else [0] * len(table)


def _read_context(path: Path) -> dict[AttentionKind, Curve]:
    """Attention of single prompts without cached tokens. Batches of equal prompts are ignored."""
    table = read_columns(path)
    batch, cached, tokens = (table.wholes(name, low=low) for name, low in (("batch_size", 1), ("step", 0), ("isl", 1)))
    rows = zip(_attention_kinds(table), zip(batch, cached, strict=True), tokens, _latency(table), strict=True)
    single = [(kind, (float(size), seconds)) for kind, case, size, seconds in rows if case == (1, 0)]
    return _grouped((kind for kind, _ in single), (point for _, point in single))


def _read_generation(path: Path) -> dict[AttentionKind, Surface]:
    """Decode attention. Cached tokens of each sequence are `isl` + `step`, its new one included."""
    table = read_columns(path)
    batch, first, later = (table.wholes(name, low=low) for name, low in (("batch_size", 1), ("isl", 1), ("step", 0)))
    columns = zip(_attention_kinds(table), batch, first, later, _latency(table), strict=True)
    rows = [(kind, count, float(isl + step), seconds) for kind, count, isl, step, seconds in columns]
    curves: dict[AttentionKind, dict[int, Curve]] = defaultdict(dict)
    by_count = _grouped(
        ((kind, count) for kind, count, *_ in rows), ((cached, seconds) for *_, cached, seconds in rows)
    )
    for (kind, count), curve in by_count.items():
        curves[kind][count] = curve
    return {kind: Surface(by_count) for kind, by_count in curves.items()}


def _read_experts(path: Path | None) -> dict[ExpertKind, Curve]:
    if path is None:
        return {}
    table = read_columns(path)
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    counts = (table.wholes(name, low=1) for name in names)
    keys = map(ExpertKind, _formats(table, "moe_dtype"), *counts, table.text("distribution"))
    return _grouped(keys, zip(table.wholes("num_tokens", low=1), _latency(table), strict=True))


def _read_all_reduce(path: Path | None) -> dict[int, Curve]:
    """All-reduces inside a CUDA graph, where eager ones were timed too."""
    if path is None:
        return {}
    table = read_columns(path)
    how = table.text("backend") if "backend" in table.names else [""] * len(table)
    rows = zip(how, table.wholes("num_gpus", low=2), table.wholes("message_size", low=1), _latency(table), strict=True)
    graph_rows = [row for row in rows if not row[0].endswith("eager")]
    return _grouped((row[1] for row in graph_rows), ((float(row[2]), row[3]) for row in graph_rows))


def _read_device(path: Path | None) -> Device | None:
    if path is None:
        return None
    document = read_yaml(path)
    return Device(
        _positive(document, path, "gpu", "mem_bw"),
        _positive(document, path, "gpu", "mem_capacity"),
        _positive(document, path, "misc", "other_mem"),
    )


def _positive(document: dict[str, Any], path: Path, section: str, name: str) -> float:
    part = document.get(section)
    value = part.get(name) if isinstance(part, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadInput("expected a number above 0", value=value, field=f"{section}.{name}", file=path)
    return float(value)


def _neighbours(grid: Collection[int], size: int) -> list[tuple[int, float]]:
    """Measured sizes around a size, with their weights; beyond the largest, that one in proportion."""
    sizes = sorted(grid)
    if size <= sizes[0]:
        return [(sizes[0], 1.0)]
    if size >= sizes[-1]:
        return [(sizes[-1], size / sizes[-1])]
    i, share = bracket(sizes, size)
    return [(sizes[i], 1 - share), (sizes[i + 1], share)] if share else [(sizes[i], 1.0)]
