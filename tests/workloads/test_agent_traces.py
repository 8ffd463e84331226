"""Agent traces: three forms of the same session, pauses worked out by hand, and refusals by line."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workloads.errors import BadInput
from workloads.recorded_sessions import RecordedSessions
from workloads.trace import IdRanges, Trace
from workloads.traces import read_trace

HEADER = "trace,agent,parent_agent,t,type,in,out,stop,api_time,think_time,block_ids"
ROWS = """\
a,0,,0.0,n,200,10,tool_use,4.0,0.0,1-3
a,1,0,0.0,n,100,5,tool_use,2.0,,90
a,1,0,5.0,n,130,5,end_turn,1.0,3.0,90-91
a,2,0,0.0,n,100,0,end_turn,3.0,,90
a,0,,13.0,n,330,20,end_turn,2.0,,1-3 7-8
b,0,,0.0,n,64,1,end_turn,,0.0,1
"""
"""Session a: the main agent's answer ends at 4 s; sub-agent 1 takes 6 s, 2 takes 3 s; 13 s - 4 s - 6 s = 3 s pass."""


def table(folder: Path, text: str = ROWS) -> Path:
    path = folder / "requests.csv"
    path.write_text(f"{HEADER}\n{text}")
    return path


def sessions_file(folder: Path) -> Path:
    def request(t: float, prompt: int, out: int, ids: list[int], **times: float) -> dict[str, Any]:
        return {"t": t, "type": "n", "in": prompt, "out": out, "hash_ids": ids} | times

    first = {
        "id": "a",
        "block_size": 64,
        "requests": [
            request(0.0, 200, 10, [1, 2, 3], api_time=4.0, think_time=0.0),
            {"type": "subagent", "t": 4.0, "requests": [
                request(4.0, 100, 5, [90], api_time=2.0),
                request(9.0, 130, 5, [90, 91], api_time=1.0, think_time=3.0),
            ]},
            {"type": "subagent", "t": 4.0, "requests": [request(4.0, 100, 0, [90], api_time=3.0)]},
            request(13.0, 330, 20, [1, 2, 3, 7, 8], api_time=2.0),
        ],
    }  # fmt: skip
    second = {"id": "b", "block_size": 64, "requests": [request(0.0, 64, 1, [1], think_time=0.0)]}
    path = folder / "sessions.jsonl"
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    return path


def test_pauses_are_those_after_the_answer_and_the_sub_agents(tmp_path: Path) -> None:
    trace = read_trace(table(tmp_path), "agents")
    assert trace.arrivals is None
    assert trace.pauses.tolist() == [0.0, 0.0, 3.0, 0.0, 3.0, 0.0]
    assert trace.sessions.tolist() == [0, 0, 0, 0, 0, 1]
    assert trace.agents.tolist() == [0, 1, 1, 2, 0, 0]
    assert trace.decode_tokens.tolist() == [10, 5, 5, 1, 20, 1]  # a call without an answer computes one token
    assert trace.prefix_blocks[4] == (1, 2, 3, 7, 8)
    assert not set(trace.prefix_blocks[0]) & set(trace.prefix_blocks[5])  # ids count anew in each session


def test_the_same_sessions_in_another_form_and_packed(tmp_path: Path) -> None:
    trace = read_trace(table(tmp_path), "agents")
    packed = tmp_path / "requests.csv.xz"
    packed.write_bytes(lzma.compress(table(tmp_path).read_bytes()))
    for other in (read_trace(sessions_file(tmp_path), "agent-sessions"), read_trace(packed, "agents")):
        assert other.digest == trace.digest


def test_spans_of_a_conversation(tmp_path: Path) -> None:
    """Two agents of one conversation, as an export and as bare spans; other spans are no requests."""

    def span(start: float, end: float, agent: str, prompt: int, out: int) -> dict[str, Any]:
        values = {"gen_ai.conversation.id": {"stringValue": "c"}, "gen_ai.agent.id": {"stringValue": agent},
                  "gen_ai.usage.input_tokens": {"intValue": str(prompt)},
                  "gen_ai.usage.output_tokens": {"intValue": str(out)}}  # fmt: skip
        attributes = [{"key": key, "value": value} for key, value in values.items()]
        nanoseconds = {"startTimeUnixNano": str(int(start * 1e9)), "endTimeUnixNano": str(int(end * 1e9))}
        return {"traceId": "t", "name": "chat", "attributes": attributes} | nanoseconds

    spans = [span(20, 22, "main", 300, 9), span(10, 12, "main", 100, 7), span(12, 15, "search", 50, 3)]
    tool = {"traceId": "t", "name": "execute_tool", "attributes": [], "startTimeUnixNano": "1"}
    export = {"resourceSpans": [{"scopeSpans": [{"spans": [*spans[:2], tool]}]}]}
    path = tmp_path / "spans.jsonl"
    path.write_text(f"{json.dumps(export)}\n{json.dumps(spans[2])}\n")
    trace = read_trace(path, "otlp")
    assert trace.prefill_tokens.tolist() == [100, 50, 300]
    assert trace.agents.tolist() == [0, 1, 0]
    assert trace.pauses.tolist() == [0.0, 0.0, 5.0]  # 20 - 12 - (15 - 12)
    assert trace.prefix_blocks is None


@pytest.mark.parametrize(
    ("row", "line", "field"),
    [
        ("a,1,0,0.0,n,100,5,,2.0,,90", 2, "agent"),
        ("a,0,,0.0,n,100,5,,2.0,,1-2-3", 2, "block_ids"),
        ("a,0,,0.0,n,64,5,,2.0,,1-9", 2, "block_ids"),
        ("a,0,,0.0,n,64,5,,soon,,1", 2, "api_time"),
        ("a,0,,,n,64,5,,1.0,,1", 2, "t"),
        ("a,0,,0.0,n,-1,5,,1.0,,1", 2, "in"),
    ],
)
def test_a_broken_row_is_refused_by_line(tmp_path: Path, row: str, line: int, field: str) -> None:
    with pytest.raises(BadInput) as refusal:
        read_trace(table(tmp_path, f"{row}\n"), "agents")
    assert (refusal.value.line, refusal.value.field) == (line, field)


@pytest.mark.parametrize(
    ("session", "field"),
    [
        ({"requests": 3}, "requests"),
        ({"requests": [{"type": "subagent", "requests": [{"t": 0, "in": 1, "out": 1}]}]}, "requests"),
        ({"requests": [{"t": 0, "in": "9", "out": None}]}, "requests[0].out"),
        ({"requests": [{"t": -1, "in": 9, "out": 1}]}, "requests[0].t"),
        ({"requests": [{"t": 0, "in": 9, "out": 1, "hash_ids": [1, 2]}]}, "requests[0].hash_ids"),
        ({"block_size": 0, "requests": []}, "block_size"),
    ],
)
def test_a_broken_session_is_refused_by_place(tmp_path: Path, session: dict[str, Any], field: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(session))
    with pytest.raises(BadInput) as refusal:
        read_trace(path, "agent-sessions")
    assert refusal.value.field == field


def test_spans_without_tokens_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text('{"attributes": {"gen_ai.operation.name": "chat"}}')
    with pytest.raises(BadInput, match="expected spans with gen_ai"):
        read_trace(path, "otlp")


def test_ranges_are_tuples_of_ids() -> None:
    ranges = IdRanges(np.array([2, 0, 1]), np.array([1, 7, 4]), np.array([3, 7, 5]))
    assert list(ranges) == [(1, 2, 3, 7), (), (4, 5)]
    assert ranges[-1] == (4, 5)
    assert ranges[:2] == [(1, 2, 3, 7), ()]
    with pytest.raises(IndexError):
        ranges[3]


def rounds(trace: Trace, **fields: Any) -> list[tuple[list[tuple[int, float]], list[list[int]]]]:
    """Of each session the (prompt, pause) of its main agent's rounds, and the prompts of each sub-agent."""
    recorded = RecordedSessions(trace, "session_ids", "recorded", **fields)
    sessions = []
    for session in recorded.sessions(np.random.default_rng(1), len(trace)):
        series = list(session.rounds)
        main = [(round.prompts[0].tokens, round.pause) for round in series]
        agents = [[round.prompts[0].tokens for round in agent] for start in series for agent in start.agents]
        sessions.append((main, agents))
    return sessions


def test_sub_agents_hang_on_the_round_that_starts_them(tmp_path: Path) -> None:
    trace = read_trace(table(tmp_path), "agents")
    assert rounds(trace) == [([(200, 0.0), (330, 3.0)], [[100, 130], [100]]), ([(64, 0.0)], [])]
    assert rounds(trace, max_pause=2.0)[0][0] == [(200, 0.0), (330, 2.0)]
    assert rounds(trace, max_model_len=134) == [([(64, 0.0)], [])]  # its first prompt alone is longer
    assert rounds(trace, max_model_len=210)[0] == ([(200, 0.0)], [[100, 130], [100]])
    assert rounds(trace, advance=(1.0, 1.0))[0] == ([(330, 3.0)], [])


def test_pauses_that_were_not_recorded(tmp_path: Path) -> None:
    lengths = Trace("t", None, np.array([5]), np.array([1]), sessions=np.array([0]))
    with pytest.raises(BadInput, match="pauses"):
        RecordedSessions(lengths, "session_ids", "recorded")
