"""Folders of LLMServingSim's profiler: CSV files, plain or gzipped, with times in microseconds.

    dense.csv          layer, tokens, time_us
    per_sequence.csv   layer, sequences, time_us
    attention.csv      prefill_chunk, kv_prefill, n_decode, kv_decode, time_us
    moe.csv            tokens, activated_experts, time_us, and ep where several degrees were measured; MoE models only
    skew.csv           regime, n, kvs, kv_big, kv_mean, t_mean_us, t_max_us, t_skew_us; optional

The provenance comes from meta.yaml or kernels_meta.yaml, beside them or one folder up.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.io.config_io import checked, read_yaml
from latency_models.io.files import Columns, read_columns
from latency_models.sources.kernel_tables.skew import SHOT, Shots, fit_skew
from latency_models.sources.kernel_tables.tables import (
    ATTENTION_AXES,
    UNKNOWN,
    AttentionTable,
    Curve,
    ExpertTable,
    KernelTables,
    TableSource,
    first_repeat,
    held_out_errors,
)
from latency_models.sources.registry import KERNEL_TABLES, other_source
from workloads.errors import BadInput

META = ("meta.yaml", "../meta.yaml", "../kernels_meta.yaml")
"""Places of the profiler's notes, relative to the folder of tables."""


def read_kernel_tables(path: Path, *, describe: bool = False) -> KernelTables:
    """Kernel tables of a profiler's folder, or of a YAML file that `twin calibrate import` wrote.

    `describe`: compute a folder's ranges and held-out errors, too, which takes seconds.
    """
    if path.is_dir():
        tables = _read_folder(path, describe=describe)
        if describe:
            tables = tables.model_copy(update={"ranges": tables.measured_ranges(), "held_out": held_out_errors(tables)})
        return tables
    if path.name.endswith((".yaml", ".yml")):
        return KernelTables.from_document(read_yaml(path), path)
    raise BadInput("expected a folder of kernel tables, or a YAML file made of one", file=path)


def _read_folder(folder: Path, *, describe: bool) -> KernelTables:
    hashes: dict[str, str] = {}
    dense = _curves(_open(folder, "dense", hashes), "tokens")
    per_sequence = _curves(_open(folder, "per_sequence", hashes), "sequences")
    attention = _attention(_open(folder, "attention", hashes))
    moe = None
    if _find(folder, "moe"):
        moe = ExpertTable(**_columns(_open(folder, "moe", hashes), ExpertTable.axes, 1, "tokens"))
    skewed = _skewed(folder) and _find(folder, "skew")
    skew = fit_skew(_skew(_open(folder, "skew", hashes)), errors=describe) if skewed else None
    return KernelTables(
        schema="twin.step-time/1",
        kind="kernel-tables",
        tensor_parallel=named_degree(folder) or 1,
        provenance=_provenance(folder, hashes),
        dense=dense,
        per_sequence=per_sequence,
        attention=attention,
        moe=moe,
        skew=skew,
    )


def named_degree(folder: Path) -> int | None:
    """The degree of tensor parallelism that ends a folder's name, as in kernels_tp2; None where none does."""
    degree = re.search(r"tp([1-9]\d*)$", folder.resolve().name)
    return int(degree[1]) if degree else None


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz") if path.is_file()), None)


def _open(folder: Path, name: str, hashes: dict[str, str]) -> Columns:
    path = _find(folder, name)
    if path is None:
        expected = f"expected a file {name}.csv or {name}.csv.gz{other_source(folder, KERNEL_TABLES)}"
        raise BadInput(expected, file=folder)
    columns = read_columns(path)
    hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return columns


def _columns(table: Columns, axes: tuple[str, ...], low: int, name: str) -> dict[str, Any]:
    """Columns of axes (`ep` may be missing) and of times; a point that repeats is refused at the column `name`."""
    missing = {"ep"} - set(table.names)
    columns: dict[str, Any] = {
        axis: [1] * len(table) if axis in missing else table.wholes(axis, low=low) for axis in axes
    }
    layers = [table.text("layer")] if "layer" in table.names else []
    place = first_repeat(zip(*layers, *columns.values(), strict=True))
    if place is not None:
        raise table.fault("expected each point once", place, name)
    columns["time_us"] = table.numbers("time_us", above=0.0)
    return {name: tuple(column) for name, column in columns.items()}


def _curves(table: Columns, axis: str) -> dict[str, Curve]:
    layers = table.text("layer")
    columns = _columns(table, (axis,), 1, axis)
    points: dict[str, list[tuple[int, float]]] = {}
    for layer, *point in zip(layers, columns[axis], columns["time_us"], strict=True):
        points.setdefault(layer, []).append((point[0], point[1]))
    curves = {layer: tuple(zip(*layer_points, strict=True)) for layer, layer_points in points.items()}
    return {layer: Curve(rows=rows, time_us=times) for layer, (rows, times) in curves.items()}


def _attention(table: Columns) -> AttentionTable:
    columns = _columns(table, ATTENTION_AXES, 0, "n_decode")
    for row, (chunk, decodes) in enumerate(zip(columns["prefill_chunk"], columns["n_decode"], strict=True)):
        if not chunk and not decodes:
            raise table.fault("expected at least 1, since prefill_chunk is 0", row, "n_decode")
    return checked(AttentionTable, columns, table.path)


def _skew(table: Columns) -> Shots:
    regimes = table.text("regime")
    for row, regime in enumerate(regimes):
        if regime not in ("pure", "mixed"):
            raise table.fault("expected pure or mixed", row, "regime")
    numbers = ("kv_mean", "kv_big", "t_mean_us", "t_max_us", "t_skew_us")
    columns: list[Any] = [
        [regime == "mixed" for regime in regimes],
        table.wholes("n", low=1),
        table.wholes("kvs", low=0),
        *(table.numbers(name, above=0.0) for name in numbers),
    ]
    return np.rec.fromarrays(columns, dtype=SHOT)


def _meta(folder: Path) -> tuple[dict[str, Any], Path | None]:
    path = next((folder / name for name in META if (folder / name).is_file()), None)
    return (read_yaml(path) if path else {}), path


def _skewed(folder: Path) -> bool:
    """False where the profiler's notes disable the shots of uneven decodes: their files are another machine's."""
    meta, path = _meta(folder)
    profile = meta.get("skew_profile", {})
    enabled = profile.get("enabled", True) if isinstance(profile, dict) else profile
    if not isinstance(enabled, bool):
        raise BadInput("expected true or false", field="skew_profile.enabled", value=enabled, file=path)
    return enabled


def _provenance(folder: Path, hashes: dict[str, str]) -> TableSource:
    meta, _ = _meta(folder)
    iterations = meta.get("measurement_iterations")
    tools = [name for name in ("vllm", "cuda", "profiler") if f"{name}_version" in meta]
    try:
        date = datetime.datetime.fromisoformat(str(meta.get("profiled_at"))).date()
    except ValueError:
        date = None
    return TableSource(
        method="measured",
        source=str(folder),
        device=str(meta.get("gpu", meta.get("hardware", UNKNOWN))),
        model=str(meta.get("model", UNKNOWN)),
        date=date,
        versions={name: str(meta[f"{name}_version"]) for name in tools},
        note=f"mean of {iterations} forward passes a point" if iterations else "",
        files=hashes,
    )
