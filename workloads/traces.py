"""Readers of traces in the public formats, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from workloads.errors import BadInput
from workloads.registry import Registry
from workloads.trace import Trace
from workloads.trace_columns import nanoseconds, seconds, timestamps
from workloads.trace_documents import read_guidellm, read_vllm_serve
from workloads.trace_files import Table
from workloads.trace_rows import Clock, Schema, read_rows

__all__ = ["AUTO", "TRACE_FORMATS", "Trace", "TraceFormat", "TraceReader", "read_trace"]

TraceFormat: TypeAlias = str
"""A name in `TRACE_FORMATS`, or `auto`."""

AUTO = "auto"

_milliseconds = Clock(seconds, 1000.0)
_SCHEMAS = MappingProxyType(
    {
        "azure": Schema("ContextTokens", "GeneratedTokens", "TIMESTAMP", True, Clock(timestamps, 1e9)),
        "burstgpt": Schema("Request tokens", "Response tokens", "Timestamp", True, session="Session ID"),
        "mooncake": Schema(
            "input_length", "output_length", "timestamp", True, _milliseconds, "hash_ids", block_tokens=512
        ),
        "bailian": Schema(
            "input_length", "output_length", "timestamp", True, Clock(seconds), "hash_ids", 16, "chat_id",
            "parent_chat_id",
        ),
        "lengths": Schema("num_prefill_tokens", "num_decode_tokens"),
        "vllm-bench": Schema(
            "input_toks", "output_toks", "arrival_time_ns", True, Clock(nanoseconds, 1e9), "block16_hash_ids",
            block_tokens=16,
        ),
        "vllm-requests": Schema("input_toks", "output_toks", "arrival_time", True, Clock(seconds)),
        "openai": Schema("usage.prompt_tokens", "usage.completion_tokens", "created"),
        "openai-batch": Schema(
            "response.body.usage.prompt_tokens", "response.body.usage.completion_tokens", "response.body.created"
        ),
        "plain": Schema("prompt_tokens", "output_tokens", "arrival", session="session"),
    }
)  # fmt: skip


def read_trace(path: str | Path, format: TraceFormat = AUTO) -> Trace:
    """The trace in a file, plain or gzipped; docs/reference/traces.md describes the formats.

    With `format="auto"` the column names tell which one it is. No row is ever dropped or mended: raises
    `BadInput` with the file, the line, the column and the value for the first thing that is wrong.
    """
    file = Path(path)
    if format == AUTO:
        return read_rows(file, _recognise)
    if format not in TRACE_FORMATS:
        raise BadInput(f"expected one of {', '.join((AUTO, *TRACE_FORMATS))}", field="format", value=format)
    return TRACE_FORMATS[format](file)


def _read(schema: Schema, file: Path) -> Trace:
    return read_rows(file, lambda table: schema)


TraceReader: TypeAlias = Callable[[Path], Trace]
TRACE_FORMATS: Registry[TraceReader] = Registry(
    {name: partial(_read, schema) for name, schema in _SCHEMAS.items()}
    | {"vllm-serve": read_vllm_serve, "guidellm": read_guidellm}
)
"""Readers of traces by the name of their format. A plug-in registers others; `auto` tells those of rows apart."""


def _recognise(table: Table) -> Schema:
    """The format that shares most column names with the table, so that an error can name a missing one."""
    schema = max(_SCHEMAS.values(), key=lambda known: sum(map(table.named, known.required)))
    if not any(map(table.named, schema.required)):
        known = "; ".join(f"{name}: {', '.join(schema.required)}" for name, schema in _SCHEMAS.items())
        expected = f"expected the columns of a known format ({known}), found {', '.join(table.names)}"
        raise BadInput(expected, file=table.file, line=table.names_line)
    return schema
