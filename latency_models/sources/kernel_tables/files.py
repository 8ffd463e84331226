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
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latency_models.io.config_io import checked, read_yaml
from latency_models.io.files import Columns, read_columns
from latency_models.sources.kernel_tables.skew import SkewFit, SkewShots, fit_skew
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
    moe = _experts(_open(folder, "moe", hashes)) if _find(folder, "moe") else None
    skewed = _skewed(folder) and _find(folder, "skew")
    skew = _skew(_open(folder, "skew", hashes), errors=describe) if skewed else None
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


def _curves(columns: Columns, axis: str) -> dict[str, Curve]:
    layers, rows = columns.text("layer"), columns.wholes(axis, low=1)
    times = columns.numbers("time_us", above=0.0)
    _refuse_repeats(columns, list(zip(layers, rows, strict=True)), axis)
    points: dict[str, list[tuple[int, float]]] = {}
    for layer, row, time in zip(layers, rows, times, strict=True):
        points.setdefault(layer, []).append((row, time))
    return {
        layer: Curve(rows=tuple(row for row, _ in layer_points), time_us=tuple(time for _, time in layer_points))
        for layer, layer_points in points.items()
    }


def _attention(columns: Columns) -> AttentionTable:
    axes = {name: tuple(columns.wholes(name, low=0)) for name in ATTENTION_AXES}
    times = tuple(columns.numbers("time_us", above=0.0))
    _refuse_repeats(columns, list(zip(*axes.values(), strict=True)), "n_decode")
    for row, (chunk, decodes) in enumerate(zip(axes["prefill_chunk"], axes["n_decode"], strict=True)):
        if not chunk and not decodes:
            raise columns.fault("expected at least 1, since prefill_chunk is 0", row, "n_decode")
    return checked(AttentionTable, {**axes, "time_us": times}, columns.path)


def _experts(columns: Columns) -> ExpertTable:
    tokens = columns.wholes("tokens", low=1)
    experts = columns.wholes("activated_experts", low=1)
    ep = columns.wholes("ep", low=1) if "ep" in columns.names else [1] * len(columns)
    _refuse_repeats(columns, list(zip(ep, tokens, experts, strict=True)), "tokens")
    times = tuple(columns.numbers("time_us", above=0.0))
    return ExpertTable(ep=tuple(ep), tokens=tuple(tokens), activated_experts=tuple(experts), time_us=times)


def _skew(columns: Columns, *, errors: bool) -> SkewFit | None:
    regimes = columns.text("regime")
    for row, regime in enumerate(regimes):
        if regime not in ("pure", "mixed"):
            raise columns.fault("expected pure or mixed", row, "regime")
    shots = SkewShots(
        mixed=np.array([regime == "mixed" for regime in regimes]),
        decodes=np.array(columns.wholes("n", low=1)),
        short=np.array(columns.wholes("kvs", low=0)),
        mean=np.array(columns.numbers("kv_mean", above=0.0)),
        longest=np.array(columns.numbers("kv_big", above=0.0)),
        at_mean=np.array(columns.numbers("t_mean_us", above=0.0)),
        at_longest=np.array(columns.numbers("t_max_us", above=0.0)),
        time=np.array(columns.numbers("t_skew_us", above=0.0)),
    )
    return fit_skew(shots, errors=errors)


def _refuse_repeats(columns: Columns, keys: Sequence[Hashable], name: str) -> None:
    place = first_repeat(keys)
    if place is not None:
        raise columns.fault("expected each point once", place, name)


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
    engine_versions = {name: str(meta[key]) for name, key in _VERSIONS.items() if key in meta}
    iterations = meta.get("measurement_iterations")
    return TableSource(
        method="measured",
        source=str(folder),
        device=str(meta.get("gpu", meta.get("hardware", UNKNOWN))),
        model=str(meta.get("model", UNKNOWN)),
        date=_date(meta.get("profiled_at")),
        versions=engine_versions,
        note=f"mean of {iterations} forward passes a point" if iterations else "",
        files=hashes,
    )


_VERSIONS = {"vllm": "vllm_version", "cuda": "cuda_version", "profiler": "profiler_version"}


def _date(value: object) -> datetime.date | None:
    if isinstance(value, datetime.datetime):
        return value.date()
    try:
        return datetime.datetime.fromisoformat(str(value)).date()
    except ValueError:
        return None
