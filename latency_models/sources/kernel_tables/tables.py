"""Kernel tables: their types, and how far each is uncertain.

The file (schema `twin.step-time/1`) contains everything that a folder of CSV files does, except skew measurements, of
which it contains the fit. A column is one text of numbers separated by blanks, since a YAML list of a hundred thousand
numbers takes seconds to read.

Unknowns are interpolation errors, factors and overheads. Of interpolation, every other inner point is left out and
predicted from its neighbours. The remaining grid is twice as coarse as the one that predictions use, so these errors
are upper bounds. Further uncertainties are listed by `unknowns_of`, each entry with the deviation that measured engines
suggest: on an RTX PRO 6000 decode steps of one run are 3 % shorter than the sum of their kernels and gaps, steps with
prompts 5 % longer; on an RTX 4090 all steps 6 % shorter.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

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
from latency_models.interpolation import line_through
from latency_models.io.config_io import Strict, checked
from latency_models.sources.kernel_tables.settings import KernelTableSettings
from latency_models.sources.kernel_tables.skew import SkewFit
from latency_models.step_time import Origin, Unknown
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


Points = Mapping[tuple[float, ...], float]


def held_out_errors(tables: KernelTables) -> dict[str, HeldOut]:
    """Errors by table and axis, where lines have three points; `dense`, `per_sequence`: of the sum of layers."""
    regimes = tables.attention.regimes
    errors = {
        "dense.tokens": _along(_sum_of_layers(tables.dense), 0),
        "per_sequence.sequences": _along(_sum_of_layers(tables.per_sequence), 0),
        "attention.decode.n_decode": _along(regimes.decode, 0),
        "attention.decode.kv_decode": _along(regimes.decode, 1),
        "attention.prefill.prefill_chunk": _along(regimes.prefill, 0),
        "attention.prefill.kv_prefill": _along(regimes.prefill, 1),
        "attention.mixed.prefill_chunk": _along(regimes.mixed, 0),
        "attention.mixed.kv_prefill": _along(regimes.mixed, 1),
        "attention.mixed.n_decode": _along(regimes.mixed, 2),
        "attention.mixed.kv_decode": _along(regimes.mixed, 3),
    }
    if tables.moe is not None:
        rows = zip(tables.moe.ep, tables.moe.tokens, tables.moe.activated_experts, tables.moe.time_us, strict=True)
        points: Points = {(ep, tokens, experts): time for ep, tokens, experts, time in rows}
        errors["moe.tokens"], errors["moe.activated_experts"] = _along(points, 1), _along(points, 2)
    return {name: error for name, error in errors.items() if error is not None}


def _sum_of_layers(curves: Mapping[str, Any]) -> Points:
    totals: dict[tuple[float, ...], float] = {}
    counts: dict[tuple[float, ...], int] = {}
    for curve in curves.values():
        for rows, time in curve.points():
            key = (float(rows),)
            totals[key] = totals.get(key, 0.0) + time
            counts[key] = counts.get(key, 0) + 1
    return {key: time for key, time in totals.items() if counts[key] == len(curves)}


def _along(points: Points, axis: int) -> HeldOut | None:
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


IN_ENGINE = Unknown(
    "engine", "kernels in an engine against kernels alone: clocks under load, fusion, caches", "assumed", 0.04,
    "a minute of the engine's own steps",
)  # fmt: skip
PROMPT_STEPS = Unknown(
    "prompt_steps", "steps with prompts against steps of decodes alone: graphs in pieces, launches", "assumed", 0.05,
    "a minute of the engine's own steps",
)  # fmt: skip
BEYOND = Unknown(
    "beyond", "batches beyond the tables: an exponent on how far", "extrapolated", None, "kernels at larger batches"
)
BEYOND_DEVIATION = 0.3
"""Deviation of the exponent: twice as far as the tables, a step is within 23 % of what their last slope says."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors on the parts of a step and on all kernels of one with prompts, and the exponent on how far a batch lies
    beyond the tables."""

    beyond: float
    dense: float
    head: float
    decode_attention: float
    prompt_attention: float
    experts: float
    prompt_steps: float

    @classmethod
    def at(cls, unknowns: Mapping[str, Unknown], scores: Mapping[str, float]) -> Factors:
        """The factors at these scores. `engine` is a factor on all kernels."""
        engine = unknowns["engine"].factor(scores.get("engine", 0.0))
        names = ("dense", "head", "decode_attention", "prompt_attention", "experts")
        parts = [
            engine * unknowns[name].factor(scores.get(name, 0.0)) if name in unknowns else engine for name in names
        ]
        prompt_steps = unknowns["prompt_steps"].factor(scores.get("prompt_steps", 0.0))
        return cls(BEYOND_DEVIATION * scores.get("beyond", 0.0), *(*parts, prompt_steps))


OVERHEAD_MISSING, GAP_MISSING = 300e-6, 1.3e-6
"""Seconds at a score of +1 where a scenario states none: an asynchronous scheduler needs 0.15 ms between two steps, a
synchronous one up to milliseconds."""


def unknowns_of(
    tables: KernelTables, settings: KernelTableSettings, experts: bool, composed_error: float | None = None
) -> tuple[Unknown, ...]:
    """The unknowns of a model from these tables; `composed_error` takes the place of the prior for kernels."""
    errors = {name: held_out.median for name, held_out in (tables.held_out or held_out_errors(tables)).items()}

    def from_tables(prefix: str, further: float) -> float:
        """The deviation of interpolation between points, and what no table says besides."""
        interpolated = max((error for name, error in errors.items() if name.startswith(prefix)), default=0.0)
        return math.hypot(interpolated, further)

    skew = tables.skew.heldout_median_error if tables.skew else None
    in_engine = IN_ENGINE
    if composed_error is not None:
        in_engine = replace(IN_ENGINE, basis="held out", deviation=max(1.5 * composed_error, 0.01))
    unknowns = [
        in_engine,
        Unknown("dense", "linear layers, as interpolated", "held out", from_tables("dense", 0.02), "kernels of layers"),
        Unknown(
            "decode_attention", "attention of decodes of uneven lengths", "held out",
            from_tables("attention.decode", 0.1 if skew is None else max(0.03, skew)),
            "kernels of attention",
        ),
        Unknown(
            "prompt_attention", "attention of prompts, alone and beside decodes", "held out",
            from_tables("attention.mixed", 0.05), "kernels of attention",
        ),
        Unknown("head", "LM head and sampler", "held out", from_tables("per_sequence", 0.05), "kernels of the head"),
        _stated("overhead", "host time between two steps", settings.overhead, "the engine's step log"),
        _stated("kernel_gap", "time between two kernels", settings.kernel_gap, "a profile of one step"),
        PROMPT_STEPS,
        BEYOND,
    ]  # fmt: skip
    if experts:
        further = math.hypot(from_tables("moe", 0.05), 0.15)
        unknowns.append(Unknown("experts", "uneven load of experts, which tables spread evenly", "assumed", further,
                             "the load of experts in the engine"))  # fmt: skip
    if settings.communication is not None and settings.ranks > 1:
        unknowns.append(Unknown("link", f"collectives ({settings.communication.source})", "assumed",
                             settings.communication.spread, "an all-reduce of this size on this machine"))  # fmt: skip
    return tuple(unknowns)


def settings_at(settings: KernelTableSettings, unknowns: Mapping[str, Unknown], scores: Mapping[str, float],
                ) -> KernelTableSettings:  # fmt: skip
    """The settings at these scores: overhead, gap and link."""
    changed: dict[str, object] = {
        "overhead": _moved(settings.overhead, OVERHEAD_MISSING, unknowns["overhead"], scores),
        "kernel_gap": _moved(settings.kernel_gap, GAP_MISSING, unknowns["kernel_gap"], scores),
    }
    link = settings.communication
    if link is not None and "link" in unknowns:
        changed["communication"] = link.scaled(unknowns["link"].factor(scores.get("link", 0.0)))
    return settings.model_copy(update=changed)


def _stated(name: str, about: str, seconds: float, measure: str) -> Unknown:
    if seconds:
        return Unknown(name, f"{about}, as the scenario states it", "stated", 0.3, measure)
    return Unknown(name, f"{about}, which the scenario leaves out", "assumed", None, measure)


def _moved(seconds: float, missing: float, unknown: Unknown, scores: Mapping[str, float]) -> float:
    """Seconds at a score. Time that was left out can only be longer than 0."""
    score = scores.get(unknown.name, 0.0)
    return seconds * unknown.factor(score) if unknown.deviation is not None else missing * max(score, 0.0)
