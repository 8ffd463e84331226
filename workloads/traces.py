"""Readers of traces in the public formats, by name."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from workloads.agent_traces import read_agent_sessions, read_agents, read_otlp
from workloads.checks import MAX_TOKENS, FloatArray, IntArray
from workloads.errors import BadInput
from workloads.registry import Registry
from workloads.trace import IdLists, Trace, whole_column
from workloads.trace_files import (
    Table,
    block_ids,
    name_of,
    nanoseconds,
    read_tables,
    seconds,
    session_names,
    timestamps,
    whole_numbers,
)

MAX_BYTES = 1 << 30
"""Bytes of a document, unpacked."""


def read_vllm_serve(file: Path) -> Trace:
    """The requests of `vllm bench serve --save-result --save-detailed`, by `start_times`; else `BadInput`."""
    document = _document(file)
    for name in ("input_lens", "output_lens"):
        if not isinstance(document.get(name), list) or not document[name]:
            expected = "expected a list of token counts, as --save-detailed writes it"
            raise BadInput(expected, file=file, field=name, value=_shown(document.get(name)))
    count = len(document["input_lens"])
    lists = {name: document.get(name) for name in ("output_lens", "start_times", "errors")}
    for name, values in lists.items():
        if values is not None and (not isinstance(values, list) or len(values) != count):
            raise BadInput(f"expected a list of {count} entries, as input_lens has", file=file, field=name)
    for i, error in enumerate(lists["errors"] or []):
        if error:
            raise BadInput("expected no failed request", file=file, field=f"errors[{i}]", value=error)
    prompts = _counts(file, "input_lens", document["input_lens"], low=0)
    answers = _counts(file, "output_lens", document["output_lens"], low=1)
    if lists["start_times"] is None:
        return Trace(name_of(file), None, prompts, answers)
    return _in_order(file, _times(file, "start_times", lists["start_times"]), prompts, answers, None)


def read_guidellm(file: Path) -> Trace:
    """The successful requests of the one benchmark in guidellm's `benchmarks.json`, by time, with sessions.

    Raises `BadInput` about the place, several benchmarks (a sweep), or requests that failed.
    """
    benchmarks = _document(file).get("benchmarks")
    if not isinstance(benchmarks, list) or len(benchmarks) != 1 or not isinstance(benchmarks[0], dict):
        count = len(benchmarks) if isinstance(benchmarks, list) else None
        raise BadInput("expected one benchmark, not a sweep of several", file=file, field="benchmarks", value=count)
    requests = benchmarks[0].get("requests")
    where = "benchmarks[0].requests"
    rows = requests.get("successful") if isinstance(requests, dict) else None
    if not isinstance(requests, dict) or not isinstance(rows, list) or not rows:
        raise BadInput("expected a list of requests", file=file, field=f"{where}.successful")
    for status in ("errored", "incomplete"):
        if requests.get(status):
            expected = "expected none: they have no whole answer"
            raise BadInput(expected, file=file, field=f"{where}.{status}", value=len(requests[status]))

    def column(name: str) -> list[Any]:
        return [row.get(name) if isinstance(row, dict) else None for row in rows]

    place = f"{where}.successful[{{}}].{{}}"
    prompts = _counts(file, place.format("{}", "prompt_tokens"), column("prompt_tokens"), low=0)
    answers = _counts(file, place.format("{}", "output_tokens"), column("output_tokens"), low=1)
    times = _times(file, place.format("{}", "request_start_time"), column("request_start_time"))
    infos = [info if isinstance(info, dict) else {} for info in column("info")]
    conversations = [info.get("conversation_id") for info in infos]
    several = len({name for name in conversations if name}) < sum(bool(name) for name in conversations)
    return _in_order(file, times, prompts, answers, conversations if several else None)


def _document(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            packed = opened.peek(2)[:2] == b"\x1f\x8b"
            content = (gzip.GzipFile(fileobj=opened) if packed else opened).read(MAX_BYTES + 1)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadInput(f"expected a file that can be read ({error})", file=file) from None
    if len(content) > MAX_BYTES:
        raise BadInput(f"expected at most {MAX_BYTES} bytes", file=file)
    try:
        document = json.loads(content)
    except json.JSONDecodeError as error:
        raise BadInput(f"expected one JSON document ({error.msg})", file=file, line=error.lineno) from None
    except (ValueError, RecursionError):  # no UTF-8, a number of thousands of digits, or brackets nested as deep
        raise BadInput("expected one JSON document in UTF-8, without deep nesting", file=file) from None
    if not isinstance(document, dict):
        raise BadInput("expected a JSON object", file=file, value=type(document).__name__)
    return document


def _counts(file: Path, name: str, values: list[Any], *, low: int) -> IntArray:
    expected = f"expected a whole number from {low} to {MAX_TOKENS}"
    _check(file, name, values, lambda value: type(value) is int and low <= value <= MAX_TOKENS, expected)
    return np.array(values, dtype=np.int64)


def _times(file: Path, name: str, values: list[Any]) -> FloatArray:
    expected = "expected a finite time, 0 or later"
    _check(file, name, values, lambda value: type(value) in (int, float) and 0 <= value < math.inf, expected)
    return np.array(values, dtype=np.float64)


def _check(file: Path, name: str, values: list[Any], usable: Callable[[Any], bool], expected: str) -> None:
    """Refuse the first value that is not usable; `name` may have a place for its index."""
    for i, value in enumerate(values):
        if not usable(value):
            field = name.format(i) if "{}" in name else f"{name}[{i}]"
            raise BadInput(expected, file=file, field=field, value=_shown(value))


def _shown(value: Any) -> Any:
    return "null" if value is None else value


def _in_order(file: Path, times: FloatArray, prompts: IntArray, answers: IntArray, sessions: list[Any] | None) -> Trace:
    """The trace in order of time: benchmark programs list requests in the order of their answers, or of sending."""
    order = np.argsort(times, kind="stable")
    numbers = None
    if sessions is not None:
        names = [sessions[i] or ("alone", i) for i in order.tolist()]
        by_name = {name: number for number, name in enumerate(dict.fromkeys(names))}
        numbers = np.array([by_name[name] for name in names], dtype=np.int64)
    arrivals = times[order] - times[order[0]]
    return Trace(name_of(file), arrivals, prompts[order], answers[order], sessions=numbers)


class Clock(NamedTuple):
    """A reader of a column of times, and how many of its units make a second."""

    read: Callable[[Table, str, float], FloatArray | IntArray]
    per_second: float = 1.0


_SECONDS = Clock(seconds)


@dataclass(frozen=True)
class Schema:
    """The columns of a format, and the unit of its clock.

    Requests of one session share the column `session`; with `parent` it is a request's own name, and `parent` that of
    the one before it in its session, which an earlier row has.
    """

    prompt: str
    output: str
    arrival: str | None = None
    arrival_required: bool = False
    clock: Clock = _SECONDS
    blocks: str | None = None
    block_tokens: int | None = None
    session: str | None = None
    parent: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        lengths = (self.prompt, self.output)
        names = (self.arrival, *lengths) if self.arrival and self.arrival_required else lengths
        return (self.session, *names) if self.session and self.parent else names


def read_rows(file: Path, choose: Callable[[Table], Schema]) -> Trace:
    """The trace in a file of rows, of the schema that `choose` finds; `BadInput` about the first fault."""
    columns: _Columns | None = None
    for table in read_tables(file):
        if columns is None:
            columns = _Columns(choose(table), table)
        columns.add(table)
    assert columns is not None
    return columns.trace(name_of(file))


class _Columns:
    """The columns of a trace, grown table by table. The first one says which optional columns there are."""

    def __init__(self, schema: Schema, first: Table) -> None:
        self._schema = schema
        self._prompts = array("q")
        self._outputs = array("q")
        self._has_times = bool(schema.arrival) and (schema.arrival_required or first.named(schema.arrival or ""))
        self._has_blocks = bool(schema.blocks) and first.named(schema.blocks or "")
        self._has_sessions = bool(schema.session) and first.named(schema.session or "")
        self._times = array("d")
        self._counts = array("q")
        self._ids = array("Q")
        self._sessions = array("q")
        self._numbers: dict[str | int, int] = {}  # of sessions, by their names or those of their requests
        self._new_sessions = 0
        self._start: float | None = None
        self._last = 0.0

    def add(self, table: Table) -> None:
        schema = self._schema
        prompts = whole_numbers(table, schema.prompt, low=0)
        self._prompts.frombytes(prompts.tobytes())
        self._outputs.frombytes(whole_numbers(table, schema.output, low=1).tobytes())
        if schema.arrival and (schema.arrival_required or table.has(schema.arrival)):
            self._add_times(table, schema.arrival)
        if schema.blocks and schema.block_tokens and table.has(schema.blocks):
            counts, ids = block_ids(table, schema.blocks, prompts, schema.block_tokens)
            self._counts.frombytes(counts.tobytes())
            self._ids.extend(ids)
        if schema.session and table.has(schema.session):
            self._add_sessions(table, schema.session)

    def trace(self, name: str) -> Trace:
        times = np.frombuffer(self._times, dtype=np.float64) if self._has_times else None
        sessions = whole_column(self._sessions) if self._has_sessions else None
        blocks, size = None, None
        if self._has_blocks:
            blocks = IdLists(whole_column(self._counts), np.frombuffer(self._ids, dtype=np.uint64))
            size = self._schema.block_tokens
        return Trace(name, times, whole_column(self._prompts), whole_column(self._outputs), blocks, size, sessions)

    def _add_times(self, table: Table, name: str) -> None:
        times = self._schema.clock.read(table, name, self._last)
        if self._start is None:
            self._start = times[0]
        self._last = times[-1]  # in the column's own type, which may be too long for a float
        self._times.frombytes(((times - self._start) / self._schema.clock.per_second).tobytes())

    def _add_sessions(self, table: Table, name: str) -> None:
        names = session_names(table, name)
        parents = session_names(table, self._schema.parent) if self._schema.parent else names
        for request, parent in zip(names, parents, strict=True):
            number = -1 if parent is None else self._numbers.get(parent, -1)
            if number < 0 and request is not None:
                number = self._new_sessions
                self._new_sessions += 1
            if request is not None:
                self._numbers[request] = number
            self._sessions.append(number)


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
    """The trace in a file, plain or gzipped, in a format of docs/reference/traces.md, or by its column names.

    No row is ever dropped or mended: raises `BadInput` with the file, the line, the column and the value.
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
    | {"agents": read_agents, "agent-sessions": read_agent_sessions, "otlp": read_otlp}
)
"""Readers of traces by the name of their format. A plug-in registers others; `auto` tells those of rows apart."""


def _recognise(table: Table) -> Schema:
    """The format that shares most column names with the table, so that an error can name a missing one."""
    schema = max(_SCHEMAS.values(), key=lambda candidate: sum(map(table.named, candidate.required)))
    if not any(map(table.named, schema.required)):
        formats = "; ".join(f"{name}: {', '.join(schema.required)}" for name, schema in _SCHEMAS.items())
        expected = f"expected the columns of a known format ({formats}), found {', '.join(table.names)}"
        raise BadInput(expected, file=table.file, line=table.names_line)
    return schema
