"""Reads traces from the results of benchmark programs: one JSON document, whose lists have an entry for each request.

A document is read as a whole. Faults name the file and the place in the document.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from workloads.checks import MAX_TOKENS, FloatArray, IntArray
from workloads.errors import BadInput
from workloads.trace import Trace
from workloads.trace_files import name_of

MAX_BYTES = 1 << 30
"""Bytes of a document, unpacked."""


def read_vllm_serve(file: Path) -> Trace:
    """The requests of `vllm bench serve --save-result --save-detailed`, in order of `start_times` where it has them.

    Raises:
        BadInput: naming the file and the place, such as `output_lens[3]`.
    """
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
    """The successful requests of the benchmark in guidellm's `benchmarks.json`, in order of `request_start_time`.

    Requests of several turns have sessions, by `info.conversation_id`.

    Raises:
        BadInput: naming the file and the place, such as `benchmarks[0].requests.successful[3].output_tokens`; where
            there are several benchmarks (a sweep), or requests that failed.
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
    for i, value in enumerate(values):
        if type(value) is not int or not low <= value <= MAX_TOKENS:
            expected = f"expected a whole number from {low} to {MAX_TOKENS}"
            raise BadInput(expected, file=file, field=_place(name, i), value=_shown(value))
    return np.array(values, dtype=np.int64)


def _times(file: Path, name: str, values: list[Any]) -> FloatArray:
    for i, value in enumerate(values):
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            expected = "expected a finite time, 0 or later"
            raise BadInput(expected, file=file, field=_place(name, i), value=_shown(value))
    return np.array(values, dtype=np.float64)


def _place(name: str, i: int) -> str:
    return name.format(i) if "{}" in name else f"{name}[{i}]"


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
