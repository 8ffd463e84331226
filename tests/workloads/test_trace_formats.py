"""Formats of other projects, as their documentation shows them, and rows that come in several tables."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workloads.errors import BadInput
from workloads.trace import IdLists
from workloads.traces import Trace, read_trace

BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a1,2.5,ChatGPT,472,18,490,Conversation log
45,,3.0,ChatGPT,1087,230,1317,API log
118,b2,1.5,GPT-4,417,276,693,Conversation log
118.5,a1,2.0,ChatGPT,600,7,607,Conversation log
"""
BAILIAN = """{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 40, "output_length": 9, \
"type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
{"chat_id": 160, "parent_chat_id": -1, "timestamp": 61.2, "input_length": 16, "output_length": 3, \
"type": "text", "turn": 1, "hash_ids": [9]}
{"chat_id": 161, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 64, "output_length": 8, \
"type": "text", "turn": 2, "hash_ids": [1, 2, 4, 5]}
{"chat_id": 162, "parent_chat_id": 161, "timestamp": 63.5, "input_length": 80, "output_length": 8, \
"type": "text", "turn": 3, "hash_ids": [1, 2, 4, 6, 7]}
"""
USAGE = {"completion_tokens": 8, "prompt_tokens": 24, "total_tokens": 32}
COMPLETION = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1724858089, "model": "m", "usage": USAGE}
SERVED: dict[str, Any] = {
    "date": "20260101-000000", "num_prompts": 3, "request_rate": "inf", "duration": 3.0, "completed": 3,
    "input_lens": [100, 200, 300], "output_lens": [10, 20, 30], "ttfts": [0.1, 0.1, 0.1],
    "itls": [[0.1], [0.1], [0.1]], "start_times": [101.0, 100.5, 103.0], "generated_texts": ["", "", ""],
    "errors": ["", "", ""],
}  # fmt: skip


def guidellm(*starts: float, conversations: tuple[str | None, ...] = (), **statuses: list[Any]) -> dict[str, Any]:
    rows = [
        {
            "type_": "generative_request_stats", "request_id": str(i), "prompt_tokens": 100 + i,
            "output_tokens": 10 + i,
            "request_start_time": start, "request_end_time": start + 1,
            "info": {"conversation_id": conversations[i] if conversations else f"only-{i}"},
        }
        for i, start in enumerate(starts)
    ]  # fmt: skip
    requests = {"successful": rows, "errored": [], "incomplete": [], "total": None} | statuses
    return {"metadata": {}, "args": {}, "benchmarks": [{"requests": requests}]}


def read(tmp_path: Path, content: object, format: str = "auto", name: str = "trace.jsonl") -> Trace:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_trace(path, format)


def columns(trace: Trace) -> tuple[Any, ...]:
    arrivals = None if trace.arrivals is None else trace.arrivals.round(9).tolist()
    sessions = None if trace.sessions is None else trace.sessions.tolist()
    return arrivals, trace.prefill_tokens.tolist(), trace.decode_tokens.tolist(), sessions


@pytest.mark.parametrize("format", ["auto", "burstgpt"])
def test_burstgpt(tmp_path: Path, format: str) -> None:
    trace = read(tmp_path, BURSTGPT, format)
    assert columns(trace) == ([0, 40, 113, 113.5], [472, 1087, 417, 600], [18, 230, 276, 7], [0, -1, 1, 0])


def test_burstgpt_of_the_first_releases_has_no_sessions(tmp_path: Path) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
    trace = read(tmp_path, "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + rows)
    assert columns(trace) == ([0, 40], [472, 1087], [18, 230], None)


def test_a_failed_request_of_burstgpt_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"trace\.jsonl:4: Response tokens: got '0', expected a whole number from 1"):
        read(tmp_path, BURSTGPT.replace("417,276", "417,0"))


@pytest.mark.parametrize("format", ["auto", "bailian"])
def test_bailian(tmp_path: Path, format: str) -> None:
    trace = read(tmp_path, BAILIAN, format)
    assert columns(trace) == ([0, 0.1, 1.4, 2.4], [40, 16, 64, 80], [9, 3, 8, 8], [0, 1, 0, 0])
    assert trace.prefix_blocks == ((1, 2, 3), (9,), (1, 2, 4, 5), (1, 2, 4, 6, 7))
    assert trace.prefix_block_tokens == 16


@pytest.mark.parametrize("format", ["auto", "openai"])
def test_completions_of_an_openai_server(tmp_path: Path, format: str) -> None:
    later = COMPLETION | {"created": 1724858092, "usage": USAGE | {"prompt_tokens": 5}}
    trace = read(tmp_path, "\n".join(map(json.dumps, (COMPLETION, later))), format)
    assert columns(trace) == ([0, 3], [24, 5], [8, 8], None)


@pytest.mark.parametrize("format", ["auto", "openai-batch"])
def test_the_output_file_of_an_openai_batch(tmp_path: Path, format: str) -> None:
    line = {"id": "batch_req_1", "custom_id": "request-1", "error": None}
    line["response"] = {"status_code": 200, "request_id": "r", "body": COMPLETION}  # type: ignore[assignment]
    assert columns(read(tmp_path, line, format)) == ([0], [24], [8], None)
    failed = line | {"response": None, "error": {"code": "batch_expired", "message": "expired"}}
    with pytest.raises(
        BadInput, match=r":2: response\.body\.usage\.prompt_tokens: expected this column, found only id"
    ):
        read(tmp_path, "\n".join(map(json.dumps, (line, failed))), format)


def test_plain_rows_may_have_sessions(tmp_path: Path) -> None:
    trace = read(tmp_path, "arrival,prompt_tokens,output_tokens,session\n0,5,1,x\n1,9,2,\n2,8,1,x\n")
    assert columns(trace)[-1] == [0, -1, 0]
    with pytest.raises(BadInput, match=r":1: session: got 1\.5, expected the name or number of a session, or nothing"):
        read(tmp_path, {"prompt_tokens": 1, "output_tokens": 1, "session": 1.5})


def test_results_of_vllm_bench_serve_in_order_of_sending(tmp_path: Path) -> None:
    trace = read(tmp_path, SERVED, "vllm-serve", "openai-infqps-m.json")
    assert columns(trace) == ([0, 0.5, 2.5], [200, 100, 300], [20, 10, 30], None)
    assert trace.name == "openai-infqps-m"
    without = {name: value for name, value in SERVED.items() if name != "start_times"}
    assert columns(read(tmp_path, without, "vllm-serve")) == (None, [100, 200, 300], [10, 20, 30], None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_lens": None}, r"input_lens: got 'null', expected a list of token counts, as --save-detailed"),
        ({"output_lens": [1, 2]}, "output_lens: expected a list of 3 entries"),
        ({"output_lens": [1, 0, 2]}, r"output_lens\[1\]: got 0, expected a whole number from 1"),
        ({"input_lens": [1, 2.5, 2]}, r"input_lens\[1\]: got 2\.5, expected a whole number from 0"),
        ({"start_times": [1, 2, "x"]}, r"start_times\[2\]: got 'x', expected a finite time"),
        ({"errors": ["", "", "timed out"]}, r"errors\[2\]: got 'timed out', expected no failed request"),
    ],
)
def test_results_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=r"trace\.jsonl: " + message):
        read(tmp_path, SERVED | change, "vllm-serve")


def test_a_benchmark_of_guidellm(tmp_path: Path) -> None:
    trace = read(tmp_path, guidellm(1700000002.5, 1700000001.0), "guidellm", "benchmarks.json")
    assert columns(trace) == ([0, 1.5], [101, 100], [11, 10], None)
    turns = guidellm(5.0, 6.0, 7.0, conversations=("a", None, "a"))
    assert columns(read(tmp_path, turns, "guidellm"))[-1] == [0, 1, 0]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (guidellm(1.0) | {"benchmarks": [{}, {}]}, "benchmarks: got 2, expected one benchmark, not a sweep"),
        (guidellm(), r"benchmarks\[0\]\.requests\.successful: expected a list of requests"),
        (guidellm(1.0, errored=[{}]), r"benchmarks\[0\]\.requests\.errored: got 1, expected none"),
        (
            guidellm(1.0, successful=[{"prompt_tokens": None, "output_tokens": 1}]),
            r"benchmarks\[0\]\.requests\.successful\[0\]\.prompt_tokens: got 'null', expected a whole number",
        ),
    ],
)
def test_benchmarks_of_guidellm_that_cannot_be_used(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(tmp_path, document, "guidellm")


@pytest.mark.parametrize("format", ["guidellm", "vllm-serve"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": 2}\n', "trace.json:2: expected one JSON document"),
        (b"[1]", "expected a JSON object"),
        (b"[" * 200_000, "without deep nesting"),
        (b'{"a": "\xff"}', "in UTF-8"),
        (gzip.compress(b"{}" * 100, mtime=0)[:-9], "expected a file that can be read"),
    ],
)
def test_documents_that_cannot_be_read(tmp_path: Path, format: str, content: bytes, message: str) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_trace(file, format)
    with pytest.raises(BadInput, match="expected a file that can be read"):
        read_trace(tmp_path / "nowhere.json", format)


# -- several tables ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("content", [BURSTGPT, BAILIAN])
def test_the_size_of_a_table_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, rows: int
) -> None:
    at_once = read(tmp_path, content)
    monkeypatch.setattr("workloads.trace_files.CHUNK_ROWS", rows)
    parts = read(tmp_path, content)
    assert columns(parts) == columns(at_once)
    assert parts.prefix_blocks == at_once.prefix_blocks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BURSTGPT.replace("118.5", "117.5"), r":5: Timestamp: got '117\.5', expected a time no earlier"),
        (BURSTGPT.replace(",600,", ",6x0,"), r":5: Request tokens: got '6x0'"),
        (
            BAILIAN.replace(', "hash_ids": [1, 2, 4, 5]', ""),
            r":3: hash_ids: expected this key on every line or on none",
        ),
        (
            BAILIAN.replace("[1, 2, 4, 6, 7]", "[1, 2, 4, 6, 7, 8]"),
            r":4: hash_ids: .*expected at most one id for every",
        ),
        (BAILIAN.replace("[1, 2, 4, 6, 7]", f"[{2**64}]"), r":4: hash_ids: .*expected a list of whole numbers"),
        (BURSTGPT + "1,2\n", r":6: number of fields: got 2, expected 8"),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_errors_name_the_line_in_any_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, message: str, rows: int
) -> None:
    monkeypatch.setattr("workloads.trace_files.CHUNK_ROWS", rows)
    with pytest.raises(BadInput, match=message):
        read(tmp_path, content)


def test_lists_of_ids_are_those_that_were_given() -> None:
    lists = ((1, 2), (), (2**64 - 1,))
    ids = IdLists.of(lists)
    assert (len(ids), ids[0], ids[-1], ids[1:]) == (3, (1, 2), (2**64 - 1,), [(), (2**64 - 1,)])
    assert ids == lists
    assert ids == IdLists.of(lists)
    assert ids != ((1, 2), (), (7,))
    assert ids != [1]
    with pytest.raises(IndexError):
        ids[3]
    assert ids.tobytes() != IdLists.of(((1,), (2,), (2**64 - 1,))).tobytes()
    assert repr(ids) == "<3 lists of 3 ids>"
    assert IdLists(np.array([1, 1]), np.array([5, 6], dtype=np.uint64)) == ((5,), (6,))
