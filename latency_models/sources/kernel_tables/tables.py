"""Kernel tables: their types, and errors of interpolation.

The file (schema `twin.step-time/1`) contains everything that a folder of CSV files does, except skew measurements, of
which it contains the fit. A column is one text of numbers separated by blanks, since a YAML list of a hundred thousand
numbers takes seconds to read.

Of interpolation, every other inner point is left out and predicted from its neighbours. The remaining grid is twice as
coarse as the one that predictions use, so these errors are upper bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from latency_models.calibration import Pair, Provenance
from latency_models.interpolation import Point, line_through
from latency_models.io.config_io import Strict, checked
from latency_models.sources.kernel_tables.skew import SkewFit
from latency_models.step_time import Origin
from workloads.errors import BadInput


def _split(value: object) -> object:
    if isinstance(value, int | float):
        return (value,)
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        return tuple(float(word) if set(word) & set(".einf") else int(word) for word in value.split())
    except ValueError:
        return value


_AsText = PlainSerializer(lambda column: " ".join(map(repr, column)), return_type=str)
Times: TypeAlias = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_split), _AsText, Field(min_length=1)]
Counts: TypeAlias = Annotated[tuple[PositiveInt, ...], BeforeValidator(_split), _AsText, Field(min_length=1)]
CountsFrom0: TypeAlias = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_split), _AsText, Field(min_length=1)]


class Table(Strict):
    """Microseconds (`time_us`) at points, which have a column for each of the `axes`."""

    axes: ClassVar[tuple[str, ...]]
    if TYPE_CHECKING:
        time_us: tuple[float, ...]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        count = len(self.time_us)
        for name, column in zip(self.axes, self.columns(), strict=True):
            if len(column) != count:
                raise BadInput(f"expected as many numbers as time_us has ({count})", field=name, value=len(column))
        points = list(zip(*self.columns(), strict=True))
        place = first_repeat(points)
        if place is not None:
            raise BadInput("expected each point once", field=", ".join(self.axes), value=list(points[place]))
        return self

    def columns(self) -> list[tuple[int, ...]]:
        """The columns of the axes."""
        return [getattr(self, name) for name in self.axes]

    def points(self) -> dict[Point, float]:
        """Microseconds by point."""
        return dict(zip(zip(*self.columns(), strict=True), self.time_us, strict=True))


class Curve(Table):
    """Microseconds of one layer by rows: tokens of the step, or sequences that sample a token."""

    axes = ("rows",)
    rows: Counts
    time_us: Times


class Regimes(NamedTuple):
    """Points of an attention table by regime. Keys have the axes of that regime, in the order of the columns."""

    decode: dict[Point, float]
    prefill: dict[Point, float]
    mixed: dict[Point, float]


ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_REGIMES = ("decodes alone", "a prompt alone", "a prompt beside decodes")


class AttentionTable(Table):
    """Microseconds of one layer's attention on each rank, for `prefill_chunk` tokens beside `n_decode` decodes."""

    axes = ATTENTION_AXES
    prefill_chunk: CountsFrom0
    kv_prefill: CountsFrom0
    n_decode: CountsFrom0
    kv_decode: CountsFrom0
    time_us: Times

    @model_validator(mode="after")
    def _complete(self) -> AttentionTable:
        for regime, points in zip(_REGIMES, self.regimes, strict=True):
            if not points:
                raise BadInput(f"expected points of {regime}", field="n_decode")
        return self

    @cached_property
    def regimes(self) -> Regimes:
        """The points, each in the regime of the kernels that ran."""
        regimes = Regimes({}, {}, {})
        for (chunk, context, count, history), time in self.points().items():
            if not chunk:
                regimes.decode[count, history] = time
            elif count:
                regimes.mixed[chunk, context, count, history] = time
            else:
                regimes.prefill[chunk, context] = time
        return regimes


class ExpertTable(Table):
    """Microseconds of one MoE block on a rank that holds one `ep`-th of the experts, routing included."""

    axes = ("ep", "tokens", "activated_experts")
    ep: Counts
    tokens: Counts
    activated_experts: Counts
    time_us: Times

    def of_degree(self, ep: int) -> dict[Point, float]:
        """Microseconds by (tokens, activated experts) for one degree of expert parallelism; empty if not measured."""
        return {(tokens, experts): time for (degree, tokens, experts), time in self.points().items() if degree == ep}


class HeldOut(Strict):
    """Relative errors of interpolation at `points` measured points that were left out."""

    points: PositiveInt
    median: Annotated[float, Field(ge=0)]
    p90: Annotated[float, Field(ge=0)]


UNKNOWN = "unknown"
"""A provenance's value for a field that the source does not state."""

TOOLS = ("python", "torch", "triton", "cuda", "profiler", "serving-twin")
"""Names in a provenance's versions that are not the measured engine."""


class TableSource(Provenance):
    """The origin of tables; `files` has the SHA-256 of each file that was read."""

    files: dict[str, str] = Field(default_factory=dict)


class KernelTables(Strict):
    """Kernel timings of one model on one device, for one rank of `tensor_parallel`, layers by name."""

    schema_: Literal["twin.step-time/1"] = Field(alias="schema")
    kind: Literal["kernel-tables"]
    tensor_parallel: PositiveInt = 1
    provenance: TableSource
    ranges: dict[str, Pair] = Field(default_factory=dict)
    held_out: dict[str, HeldOut] = Field(default_factory=dict)
    dense: Annotated[dict[str, Curve], Field(min_length=1)]
    per_sequence: dict[str, Curve]
    attention: AttentionTable
    moe: ExpertTable | None = None
    skew: SkewFit | None = None

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KernelTables:
        return self  # frozen: plans of one sweep share a hundred thousand numbers

    @property
    def origin(self) -> Origin:
        source = self.provenance
        engine = next((name for name in source.versions if name not in TOOLS), "")
        names = ("" if text == UNKNOWN else text for text in (source.device, source.model))
        gpu, model = names
        return Origin(gpu, engine, source.versions.get(engine, ""), model, self.tensor_parallel)

    def recorded(self, origin: Origin) -> KernelTables:
        """The same tables, measured on `origin`."""
        versions = dict(self.provenance.versions)
        if origin.engine:
            versions[origin.engine] = origin.engine_version
        source = {"device": origin.gpu or UNKNOWN, "model": origin.model or UNKNOWN, "versions": versions}
        provenance = self.provenance.model_copy(update=source)
        degree = origin.tensor_parallel or self.tensor_parallel
        return self.model_copy(update={"provenance": provenance, "tensor_parallel": degree})

    def document(self) -> dict[str, Any]:
        """Content of the file. `from_document` reads it as equal tables."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def from_document(cls, document: dict[str, Any], file: Path | None = None) -> KernelTables:
        """Check the content of a file; `file` is named in errors."""
        return checked(cls, document, file)

    def measured_ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of every axis."""
        columns: dict[str, Sequence[float]] = {
            "dense.tokens": [rows for curve in self.dense.values() for rows in curve.rows],
            "per_sequence.sequences": [rows for curve in self.per_sequence.values() for rows in curve.rows],
            **{f"attention.{name}": getattr(self.attention, name) for name in ATTENTION_AXES},
        }
        if self.moe is not None:
            columns["moe.tokens"] = self.moe.tokens
            columns["moe.activated_experts"] = self.moe.activated_experts
        return {name: (float(min(values)), float(max(values))) for name, values in columns.items() if values}


def first_repeat(keys: Iterable[Hashable]) -> int | None:
    """Place of the first key that has occurred before; None if there is none."""
    keys = list(keys)
    if len(set(keys)) == len(keys):
        return None
    earlier: set[Hashable] = set()
    for place, key in enumerate(keys):
        if key in earlier:
            return place
        earlier.add(key)
    return None


def held_out_errors(tables: KernelTables) -> dict[str, HeldOut]:
    """Errors by table and axis, where lines have three points; `dense`, `per_sequence`: of the sum of layers."""
    regimes = tables.attention.regimes
    parts: list[tuple[str, Mapping[Point, float], tuple[str, ...]]] = [
        ("dense", _sum_of_layers(tables.dense), ("tokens",)),
        ("per_sequence", _sum_of_layers(tables.per_sequence), ("sequences",)),
        ("attention.decode", regimes.decode, ATTENTION_AXES[2:]),
        ("attention.prefill", regimes.prefill, ATTENTION_AXES[:2]),
        ("attention.mixed", regimes.mixed, ATTENTION_AXES),
    ]
    parts += [("moe", tables.moe.points(), tables.moe.axes)] if tables.moe is not None else []
    axes_of_parts = ((f"{table}.{axis}", points, i) for table, points, axes in parts for i, axis in enumerate(axes))
    errors = {name: _along(points, i) for name, points, i in axes_of_parts if name != "moe.ep"}
    return {name: error for name, error in errors.items() if error is not None}


def _sum_of_layers(curves: Mapping[str, Curve]) -> dict[Point, float]:
    """The sum at points that all layers have."""
    layers = [curve.points() for curve in curves.values()]
    counts = Counter(point for layer in layers for point in layer)
    return {point: sum(layer[point] for layer in layers) for point, count in counts.items() if count == len(layers)}


def _along(points: Mapping[Point, float], axis: int) -> HeldOut | None:
    """Errors of every other inner point on each line of points that differ on one axis only."""
    lines: dict[tuple[float, ...], list[tuple[float, float]]] = {}
    for key, time in points.items():
        lines.setdefault(key[:axis] + key[axis + 1 :], []).append((key[axis], time))
    errors = []
    for line in lines.values():
        line.sort()
        for i in range(1, len(line) - 1, 2):
            before, (x, time), after = line[i - 1 : i + 2]
            errors.append(abs(line_through(before, after, x) - time) / time)
    if not errors:
        return None
    return HeldOut(points=len(errors), median=float(np.median(errors)), p90=float(np.percentile(errors, 90)))
