"""Kernel timings as data: columns, their provenance, and the form as one file.

The file (schema `twin.step-time/1`) contains everything that a folder of CSV files does, except skew measurements, of
which it contains the fit. A column is one text of numbers separated by blanks, since a YAML list of a hundred thousand
numbers takes seconds to read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

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
from latency_models.io.config_io import Strict, checked
from latency_models.origin import Origin
from latency_models.sources.kernel_tables.skew import SkewFit
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


def _joined(column: Sequence[float]) -> str:
    return " ".join(map(repr, column))


_AsText = PlainSerializer(_joined, return_type=str)
Times: TypeAlias = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_split), _AsText, Field(min_length=1)]
Counts: TypeAlias = Annotated[tuple[PositiveInt, ...], BeforeValidator(_split), _AsText, Field(min_length=1)]
CountsFrom0: TypeAlias = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_split), _AsText, Field(min_length=1)]


class Curve(Strict):
    """Microseconds of one layer by rows: tokens of the step, or sequences that sample a token."""

    rows: Counts
    time_us: Times

    @model_validator(mode="after")
    def _agrees(self) -> Curve:
        _check_columns({"rows": self.rows}, self.time_us)
        return self

    def points(self) -> list[tuple[int, float]]:
        """The points (rows, microseconds), rows rising."""
        return sorted(zip(self.rows, self.time_us, strict=True))


class Regimes(NamedTuple):
    """Points of an attention table by regime. Keys hold the axes of that regime, in the order of the columns."""

    decode: dict[tuple[float, ...], float]
    prefill: dict[tuple[float, ...], float]
    mixed: dict[tuple[float, ...], float]


class AttentionTable(Strict):
    """Microseconds of one layer's attention on each rank, for `prefill_chunk` tokens beside `n_decode` decodes."""

    prefill_chunk: CountsFrom0
    kv_prefill: CountsFrom0
    n_decode: CountsFrom0
    kv_decode: CountsFrom0
    time_us: Times

    @model_validator(mode="after")
    def _agrees(self) -> AttentionTable:
        _check_columns({name: getattr(self, name) for name in ATTENTION_AXES}, self.time_us)
        for regime, points in self.regimes._asdict().items():
            if not points:
                raise BadInput(f"expected points of {_REGIMES[regime]}", field="n_decode")
        return self

    @cached_property
    def regimes(self) -> Regimes:
        """The points, each in the regime of the kernels that ran."""
        decode: dict[tuple[float, ...], float] = {}
        prefill: dict[tuple[float, ...], float] = {}
        mixed: dict[tuple[float, ...], float] = {}
        columns = (getattr(self, name) for name in ATTENTION_AXES)
        for chunk, context, count, history, time in zip(*columns, self.time_us, strict=True):
            if not chunk:
                decode[count, history] = time
            elif count:
                mixed[chunk, context, count, history] = time
            else:
                prefill[chunk, context] = time
        return Regimes(decode, prefill, mixed)


ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_REGIMES = {"decode": "decodes alone", "prefill": "a prompt alone", "mixed": "a prompt beside decodes"}


class ExpertTable(Strict):
    """Microseconds of one MoE block on a rank that holds one `ep`-th of the experts, routing included."""

    ep: Counts
    tokens: Counts
    activated_experts: Counts
    time_us: Times

    @model_validator(mode="after")
    def _agrees(self) -> ExpertTable:
        axes = ("ep", "tokens", "activated_experts")
        _check_columns({name: getattr(self, name) for name in axes}, self.time_us)
        return self

    def points(self, ep: int) -> dict[tuple[float, ...], float]:
        """Microseconds by (tokens, activated experts) for one degree of expert parallelism; empty if not measured."""
        rows = zip(self.ep, self.tokens, self.activated_experts, self.time_us, strict=True)
        return {(tokens, experts): time for degree, tokens, experts, time in rows if degree == ep}


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


def _check_columns(axes: dict[str, tuple[int, ...]], times: tuple[float, ...]) -> None:
    for name, column in axes.items():
        if len(column) != len(times):
            raise BadInput(f"expected as many numbers as time_us has ({len(times)})", field=name, value=len(column))
    place = first_repeat(zip(*axes.values(), strict=True))
    if place is not None:
        point = {name: column[place] for name, column in axes.items()}
        raise BadInput("expected each point once", field=", ".join(axes), value=list(point.values()))
