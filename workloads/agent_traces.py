"""Readers of agent traces: sessions whose requests follow tool calls, with sub-agents that run side by side.

Three forms are read. `agents` is a table with a row for each request; `agent-sessions` has a session on each line, in
the form of kv-cache-tester's traces (callanjfox/kv-cache-tester, docs/trace_replay_tester.md); `otlp` are exported
OpenTelemetry spans with attributes of the GenAI conventions (opentelemetry.io, semantic conventions 1.41). An answer of
no tokens, as of a call that was broken off, counts as one token, which an engine computes at least.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workloads.checks import MAX_TOKENS
from workloads.errors import BadInput
from workloads.trace import IdRanges, Trace, whole_column
from workloads.trace_files import Table, json_lines, name_of, read_tables, session_names, whole_numbers

SESSION_IDS = 1 << 40
"""Ids of blocks that one session may use, as ids of a trace count from 1 in each session."""

USAGE = {"gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"}
TIMES = ("startTimeUnixNano", "endTimeUnixNano")
"""Attributes and fields of a span that is a request."""

_RANGES = re.compile(r"\d+(-\d+)?( \d+(-\d+)?)*", re.ASCII)


class _Row(NamedTuple):
    """One request, in seconds; NaN for times that are not recorded, None for the ranges of its prompt's block ids."""

    agent: int
    time: float
    prompt: int
    answer: int
    api: float = math.nan
    think: float = math.nan
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def end(self) -> float:
        """When its answer was complete; where that is not recorded, when it was sent."""
        return self.time if math.isnan(self.api) else self.time + self.api


def read_agents(file: Path) -> Trace:
    """Requests of agents, a row each: trace, agent, t, in, out, api_time, think_time, block_ids.

    `agent` 0 is the main agent of a `trace`. Rows of a sub-agent come behind the row that starts it, with `t` from any
    time of their own. `block_ids` are ranges such as `1-258 353-364`, one id for each 64 tokens, within the trace.
    """
    sessions: dict[str | int, list[_Row]] = {}
    for table in read_tables(file):
        names = session_names(table, "trace")
        columns = [whole_numbers(table, name, low=low).tolist() for name, low in (("agent", 0), ("in", 0), ("out", 0))]
        times = [_optional(table, name) for name in ("t", "api_time", "think_time")]
        blocks = table.column("block_ids")
        rows = zip(table.lines, names, *columns, *times, blocks, strict=True)
        for line, name, agent, prompt, answer, time, api, think, cell in rows:
            if name is None or math.isnan(time):
                raise BadInput(
                    "expected a name and a time", file=file, line=line, field="trace" if name is None else "t"
                )
            session = sessions.setdefault(name, [])
            if agent and not session:
                raise BadInput("expected a row of agent 0 before", file=file, line=line, field="agent", value=agent)
            ranges = _ranges(cell, prompt, 64)
            if ranges is None:
                expected = "expected ranges such as 1-258 353-364, an id for each 64 tokens of the prompt"
                raise BadInput(expected, file=file, line=line, field="block_ids", value=cell)
            session.append(_Row(agent, time, prompt, answer, api, think, ranges))
    return _trace(name_of(file), sessions.values(), 64)


def read_agent_sessions(file: Path) -> Trace:
    """Sessions of agents, one JSON object a line: `id`, `block_size`, and `requests` with t, in, out and hash_ids.

    An entry of type `subagent` has `requests` of its own. `api_time` and `think_time` are optional.
    """
    sessions, size = [], None
    for line, session in json_lines(file):
        block_size = session.get("block_size", 64)
        if type(block_size) is not int or block_size < 1 or size not in (None, block_size):
            expected = f"expected {size or 'a whole number'} on every line"
            raise BadInput(expected, file=file, line=line, field="block_size", value=block_size)
        size = block_size
        rows = list(_session_rows(file, line, session.get("requests"), size))
        if not rows or rows[0].agent:
            raise BadInput("expected a request of the main agent first", file=file, line=line, field="requests")
        sessions.append(rows)
    return _trace(name_of(file), sessions, size)


def read_otlp(file: Path) -> Trace:
    """Exported OpenTelemetry spans, one JSON object a line: spans, or exports with `resourceSpans`.

    A request is a span with `gen_ai.usage.input_tokens` and `gen_ai.usage.output_tokens`. Its session is
    `gen_ai.conversation.id`, else its trace; its agent `gen_ai.agent.id`, else `gen_ai.agent.name`, the first of a
    session being the main one. Blocks are not recorded.
    """
    spans: list[tuple[str, str, _Row]] = []
    for line, document in json_lines(file):
        for span in _spans(document):
            attributes = _attributes(span)
            if not attributes.keys() >= USAGE:
                continue
            stated = {name: attributes[name] for name in sorted(USAGE)} | {name: span.get(name) for name in TIMES}
            prompt, answer, start, end = (_count(file, line, name, value) for name, value in stated.items())
            session = str(attributes.get("gen_ai.conversation.id") or span.get("traceId"))
            agent = str(attributes.get("gen_ai.agent.id") or attributes.get("gen_ai.agent.name") or "")
            spans.append((session, agent, _Row(0, start / 1e9, prompt, answer, max(end - start, 0) / 1e9)))
    if not spans:
        raise BadInput("expected spans with gen_ai.usage.input_tokens and gen_ai.usage.output_tokens", file=file)
    spans.sort(key=lambda span: span[2].time)
    sessions: dict[str, list[_Row]] = {}
    agents: dict[str, dict[str, int]] = {}
    for session, agent, row in spans:
        numbers = agents.setdefault(session, {})
        number = numbers.setdefault(agent, len(numbers))
        sessions.setdefault(session, []).append(row._replace(agent=number))
    return _trace(name_of(file), sessions.values(), None)


@dataclass(slots=True)
class _Chain:
    """The requests of one agent so far: its last one, and how long it has taken."""

    last: _Row
    start: float

    @property
    def seconds(self) -> float:
        return self.last.end - self.start


def _pauses(rows: Sequence[_Row]) -> Iterator[float]:
    """The seconds before each request: since the agent's earlier answer, without the time of its sub-agents."""
    main: _Chain | None = None
    sub_agents: dict[int, _Chain] = {}
    for row in rows:
        chain = sub_agents.get(row.agent) if row.agent else main
        if chain is None:
            yield 0.0
            chain = _Chain(row, row.time)
        else:
            waited = max((agent.seconds for agent in sub_agents.values()), default=0.0) if row.agent == 0 else 0.0
            think = row.time - chain.last.end if math.isnan(row.think) else row.think
            yield max(think - waited, 0.0)
            chain.last = row
        if row.agent:
            sub_agents[row.agent] = chain
        else:
            main, sub_agents = chain, {}


def _trace(name: str, sessions: Iterable[Sequence[_Row]], block_tokens: int | None) -> Trace:
    prompts, answers, numbers, agents, pauses = array("q"), array("q"), array("q"), array("q"), array("d")
    counts, starts, ends = array("q"), array("q"), array("q")
    for number, rows in enumerate(sessions):
        pauses.extend(_pauses(rows))
        for row in rows:
            prompts.append(row.prompt)
            answers.append(max(row.answer, 1))
            numbers.append(number)
            agents.append(row.agent)
            counts.append(len(row.ranges or ()))
            for start, end in row.ranges or ():
                starts.append(number * SESSION_IDS + start)
                ends.append(number * SESSION_IDS + end)
    blocks = None if block_tokens is None else IdRanges(whole_column(counts), whole_column(starts), whole_column(ends))
    return Trace(
        name, None, whole_column(prompts), whole_column(answers), blocks, block_tokens, whole_column(numbers),
        np.frombuffer(pauses, dtype=np.float64), whole_column(agents),
    )  # fmt: skip


def _optional(table: Table, name: str) -> list[float]:
    """A column of seconds, NaN where a cell is empty or null."""
    seconds = []
    for line, cell in zip(table.lines, table.column(name), strict=True):
        if cell is None or cell == "":
            seconds.append(math.nan)
            continue
        value = table.number(cell)
        if not 0 <= value < math.inf:
            raise BadInput(
                "expected seconds, 0 or more, or nothing", file=table.file, line=line, field=name, value=cell
            )
        seconds.append(value)
    return seconds


def _ranges(cell: object, prompt: int, block_tokens: int) -> tuple[tuple[int, int], ...] | None:
    """The ranges in a cell; None unless they are ranges of at most as many ids as the prompt has blocks."""
    text = str(cell).strip()
    if text and not _RANGES.fullmatch(text):
        return None
    pairs = [part.partition("-") for part in text.split()]
    ranges = tuple((int(start), int(end or start)) for start, _, end in pairs)
    count = sum(end - start + 1 for start, end in ranges)
    fits = all(start <= end < SESSION_IDS for start, end in ranges) and count <= -(-prompt // block_tokens)
    return ranges if fits else None


def _session_rows(file: Path, line: int, requests: object, block_size: int) -> Iterator[_Row]:
    """The rows of a session, those of its sub-agents behind the request that starts them."""
    sub_agents = 0
    for place, request in _objects(file, line, "requests", requests):
        if request.get("type") != "subagent":
            yield _session_row(file, line, place, request, 0, block_size)
            continue
        sub_agents += 1
        for inner, own in _objects(file, line, f"{place}.requests", request.get("requests")):
            yield _session_row(file, line, inner, own, sub_agents, block_size)


def _objects(file: Path, line: int, field: str, entries: object) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadInput("expected a list of objects", file=file, line=line, field=field)
    return ((f"{field}[{i}]", entry) for i, entry in enumerate(entries))


def _session_row(file: Path, line: int, place: str, request: dict[str, Any], agent: int, block_size: int) -> _Row:
    prompt = _count(file, line, f"{place}.in", request.get("in"))
    answer = _count(file, line, f"{place}.out", request.get("out"))
    times = []
    for name in ("t", "api_time", "think_time"):
        value = request.get(name)
        if value is None and name != "t":
            times.append(math.nan)
        elif isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            times.append(float(value))
        else:
            expected = "expected seconds, 0 or more"
            raise BadInput(expected, file=file, line=line, field=f"{place}.{name}", value=value)
    ids = request.get("hash_ids", [])
    whole = isinstance(ids, list) and all(type(key) is int and 0 <= key < SESSION_IDS for key in ids)
    if not whole or len(ids) > -(-prompt // block_size):
        expected = f"expected a list of whole numbers, one for each {block_size} tokens of the prompt"
        raise BadInput(expected, file=file, line=line, field=f"{place}.hash_ids")
    return _Row(agent, times[0], prompt, answer, times[1], times[2], _compressed(ids))


def _compressed(ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    runs = groupby(enumerate(ids), lambda pair: pair[1] - pair[0])
    return tuple((keys[0], keys[-1]) for keys in ([key for _, key in run] for _, run in runs))


def _spans(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of an export; a document without `resourceSpans` is one itself."""
    if "resourceSpans" not in document:
        yield document
        return
    for resource in document["resourceSpans"]:
        for scope in resource.get("scopeSpans", []):
            yield from scope.get("spans", [])


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span, by name: an object, or OTLP's list of keys and typed values."""
    attributes = span.get("attributes", {})
    if isinstance(attributes, dict):
        return attributes
    return {entry["key"]: next(iter(entry.get("value", {}).values()), None) for entry in attributes}


def _count(file: Path, line: int, field: str, value: object) -> int:
    """A whole number; OTLP writes those of 64 bits as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    high = MAX_TOKENS if field not in TIMES else 2**63 - 1
    if type(value) is not int or not 0 <= value <= high:
        shown = "null" if value is None else value
        raise BadInput(f"expected a whole number from 0 to {high}", file=file, line=line, field=field, value=shown)
    return value
