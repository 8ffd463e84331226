"""Recorded workloads: traces, and readers of the public formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from workloads.checks import FloatArray, IntArray, instants, token_counts, whole
from workloads.errors import BadInput
from workloads.pairs import JointEmpirical
from workloads.registry import Registry
from workloads.request import Request
from workloads.trace_columns import block_ids, nanoseconds, seconds, timestamps, whole_numbers
from workloads.trace_files import Table, read_table

TraceFormat: TypeAlias = str
"""A name in `TRACE_FORMATS`, or `auto`."""


@dataclass(frozen=True, eq=False)
class Trace:
    """A recorded workload, column by column; row i of each column is request i.

    `arrivals` is float64, seconds since the first request, or None where the source has no times.
    `prefill_tokens` and `decode_tokens` are int64 with decode >= 1. `prefix_blocks` names each prompt's
    leading blocks of `prefix_block_tokens` tokens, or is None. All arrays have shape (n,) with n >= 1 and are
    read-only. Raises `BadInput` for columns of unequal length and for values outside these ranges.
    """

    name: str
    arrivals: FloatArray | None
    prefill_tokens: IntArray
    decode_tokens: IntArray
    prefix_blocks: tuple[tuple[int, ...], ...] | None = None
    prefix_block_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill_tokens", token_counts(self.prefill_tokens, "prefill_tokens"))
        object.__setattr__(self, "decode_tokens", token_counts(self.decode_tokens, "decode_tokens", low=1))
        if self.arrivals is not None:
            object.__setattr__(self, "arrivals", instants(self.arrivals, "arrivals"))
        if (self.prefix_blocks is None) != (self.prefix_block_tokens is None):
            raise BadInput("expected both of prefix_blocks and prefix_block_tokens, or neither", field="Trace")
        for field in ("arrivals", "decode_tokens", "prefix_blocks"):
            column = getattr(self, field)
            if column is not None and len(column) != len(self):
                expected = f"expected {len(self)} rows, as prefill_tokens has"
                raise BadInput(expected, field=field, value=len(column))

    def __len__(self) -> int:
        return len(self.prefill_tokens)

    def pairs(self) -> JointEmpirical:
        """The joint distribution of (prefill, decode) lengths, correlation kept."""
        return JointEmpirical(self.prefill_tokens, self.decode_tokens)

    def requests(self, *, max_tokens: int | None = None, model: str = "default") -> list[Request]:
        """The requests in order; `id` is the row, so that the backend can look up `decode_tokens`.

        A trace does not contain the client's limit. All requests get the same one, by default the longest answer of the
        trace, so that no limit reveals the length of an answer. Without recorded arrivals all arrive at 0.

        Raises `BadInput` for a `max_tokens` below the longest answer.
        """
        limit = whole(self.decode_tokens.max() if max_tokens is None else max_tokens, "max_tokens", low=1)
        if limit < self.decode_tokens.max():
            longest = f"expected at least the longest answer of the trace ({self.decode_tokens.max()} tokens)"
            raise BadInput(longest, field="max_tokens", value=max_tokens)
        arrivals = np.zeros(len(self)) if self.arrivals is None else self.arrivals
        blocks = self.prefix_blocks or ((),) * len(self)
        rows = zip(arrivals.tolist(), self.prefill_tokens.tolist(), blocks, strict=True)
        return [
            Request(row, arrival, prompt, limit, model, prefix) for row, (arrival, prompt, prefix) in enumerate(rows)
        ]


@dataclass(frozen=True)
class _Schema:
    """The columns of a format, and the unit of its clock."""

    prompt: str
    output: str
    arrival: str | None = None
    arrival_required: bool = False
    clock: Callable[[Table, str], FloatArray] = seconds
    blocks: str | None = None
    block_tokens: int | None = None

    @property
    def required(self) -> tuple[str, ...]:
        lengths = (self.prompt, self.output)
        return (self.arrival, *lengths) if self.arrival and self.arrival_required else lengths


_milliseconds = partial(seconds, per_second=1000.0)
_SCHEMAS = MappingProxyType(
    {
        "azure": _Schema("ContextTokens", "GeneratedTokens", "TIMESTAMP", True, timestamps),
        "mooncake": _Schema(
            "input_length", "output_length", "timestamp", True, _milliseconds, "hash_ids", block_tokens=512
        ),
        "lengths": _Schema("num_prefill_tokens", "num_decode_tokens"),
        "vllm-bench": _Schema(
            "input_toks", "output_toks", "arrival_time_ns", True, nanoseconds, "block16_hash_ids", block_tokens=16
        ),
        "plain": _Schema("prompt_tokens", "output_tokens", "arrival"),
    }
)


def read_trace(path: str | Path, format: TraceFormat = "auto") -> Trace:
    """The trace in a file, plain or gzipped; docs/reference/traces.md describes the formats.

    With `format="auto"` the column names tell which one it is. No row is ever dropped or mended: raises
    `BadInput` with the file, the line, the column and the value for the first thing that is wrong.
    """
    file = Path(path)
    if format == AUTO:
        table = read_table(file)
        return _trace(table, _recognise(table))
    if format not in TRACE_FORMATS:
        raise BadInput(f"expected one of {', '.join((AUTO, *TRACE_FORMATS))}", field="format", value=format)
    return TRACE_FORMATS[format](file)


def _read(schema: _Schema, file: Path) -> Trace:
    return _trace(read_table(file), schema)


TraceReader: TypeAlias = Callable[[Path], Trace]
TRACE_FORMATS: Registry[TraceReader] = Registry({name: partial(_read, schema) for name, schema in _SCHEMAS.items()})
"""Readers of traces by the name of their format. A plug-in registers others; `auto` tells the built-in ones apart."""

AUTO = "auto"


def _trace(table: Table, schema: _Schema) -> Trace:
    prefill = whole_numbers(table, schema.prompt, low=0)
    decode = whole_numbers(table, schema.output, low=1)
    arrivals = None
    if schema.arrival and (schema.arrival_required or table.has(schema.arrival)):
        arrivals = schema.clock(table, schema.arrival)
    if not (schema.blocks and schema.block_tokens and table.has(schema.blocks)):
        return Trace(_name(table.file), arrivals, prefill, decode)
    blocks = block_ids(table, schema.blocks, prefill, schema.block_tokens)
    return Trace(_name(table.file), arrivals, prefill, decode, blocks, schema.block_tokens)


def _recognise(table: Table) -> _Schema:
    """The format that shares most column names with the table, so that an error can name a missing one."""
    schema = max(_SCHEMAS.values(), key=lambda known: len(set(known.required) & set(table.names)))
    if not set(schema.required) & set(table.names):
        known = "; ".join(f"{name}: {', '.join(schema.required)}" for name, schema in _SCHEMAS.items())
        expected = f"expected the columns of a known format ({known}), found {', '.join(table.names)}"
        raise BadInput(expected, file=table.file, line=table.names_line)
    return schema


def _name(file: Path) -> str:
    name = file.name.removesuffix(".gz")
    return name.removesuffix(".csv").removesuffix(".jsonl")
