"""Trace events of engines and requests, for Perfetto or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from reports.run_directory import replacing

KINDS = ("decode", "mixed", "one-shot")
COUNTERS = {"requests": ("running", "waiting"), "free blocks": ("free",)}


class StepLog(Protocol):
    """Steps of one engine: when each ended; of those logged one by one (`index`) the start, prompt tokens and kind
    (`KINDS`); (time, running, waiting, free blocks) from each boundary on at which one of them may have changed, flat
    in `changes`; and start and end of its outages.
    """

    name: str

    @property
    def ends(self) -> Sequence[float]: ...

    @property
    def index(self) -> Sequence[int]: ...

    @property
    def starts(self) -> Sequence[float]: ...

    @property
    def prefill_tokens(self) -> Sequence[int]: ...

    @property
    def kinds(self) -> Sequence[int]: ...

    @property
    def changes(self) -> Sequence[float]: ...

    @property
    def outages(self) -> Sequence[tuple[float, float]]: ...


class Requests(Protocol):
    """Requests as columns of one length."""

    @property
    def id(self) -> Sequence[int]: ...

    @property
    def arrival(self) -> Sequence[float]: ...

    @property
    def first_token(self) -> Sequence[float]: ...

    @property
    def last_token(self) -> Sequence[float]: ...


def write_trace_events(file: Path, logs: Sequence[StepLog], requests: Requests) -> None:
    """Write the trace atomically, compressed."""
    with replacing(file) as draft, gzip.open(draft, "wt", encoding="utf-8") as out:
        for i, event in enumerate(trace_events(logs, requests)):
            out.write(("[\n" if i == 0 else ",\n") + json.dumps(event))
        out.write("\n]\n")


def trace_events(logs: Sequence[StepLog], requests: Requests) -> Iterator[dict[str, Any]]:
    """A process for each engine, with its steps and counters, and one for requests. Times in microseconds.

    Steps passed over because nothing changed are one slice, "decode ×k". An outage is a slice between steps.
    """
    for pid, log in enumerate(logs, start=1):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": log.name}}
        yield from _steps(log, pid)
        for start, end in log.outages:
            yield _slice("outage", start, end, pid, {})
        yield from _counters(log, pid)
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "requests"}}
    for number, arrival, first, last in zip(
        requests.id, requests.arrival, requests.first_token, requests.last_token, strict=True
    ):
        for name, begin, end in (("to first token", arrival, first), ("decode", first, last)):
            common = {"cat": "request", "id": number, "pid": 0, "tid": 0, "name": name}
            yield {**common, "ph": "b", "ts": begin * 1e6}
            yield {**common, "ph": "e", "ts": end * 1e6}


def _steps(log: StepLog, pid: int) -> Iterator[dict[str, Any]]:
    begin, end = 0, 0.0
    for step, start, tokens, kind in zip(log.index, log.starts, log.prefill_tokens, log.kinds, strict=True):
        if step > begin:
            yield _slice(f"decode ×{step - begin}", end, log.ends[step - 1], pid, {})
        yield _slice(KINDS[kind], start, log.ends[step], pid, {"prompt tokens": tokens})
        begin, end = step + 1, log.ends[step]
    if len(log.ends) > begin:
        yield _slice(f"decode ×{len(log.ends) - begin}", end, log.ends[-1], pid, {})


def _slice(name: str, start: float, end: float, pid: int, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "pid": pid, "tid": 1, "name": name, **times, "args": args}


def _counters(log: StepLog, pid: int) -> Iterator[dict[str, Any]]:
    changes, last = log.changes, {"requests": (-1.0, -1.0), "free blocks": (-1.0,)}
    for i in range(0, len(changes), 4):
        now, running, waiting, free = changes[i : i + 4]
        for name, values in (("requests", (running, waiting)), ("free blocks", (free,))):
            if values != last[name]:
                last[name] = values
                args = dict(zip(COUNTERS[name], values, strict=True))
                yield {"ph": "C", "pid": pid, "name": name, "ts": now * 1e6, "args": args}
