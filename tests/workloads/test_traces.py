"""Traces that can be read: what each format means, and that what was written comes back."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import BadInput
from workloads.traces import Trace, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9999999,374,44
2023-11-17 00:00:00.0000001,0,109
2023-11-17 00:00:01.5000000,879,1
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 1025, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 512, "output_length": 1, "hash_ids": [0]}
{"timestamp": 6001, "input_length": 3, "output_length": 9, "hash_ids": []}
"""
LENGTHS = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
74,918,992,0.08
290,905,1195,nonsense
"""
VLLM_BENCH = """{"input_toks": 33, "output_toks": 5, "arrival_time_ns": 46926808, "block16_hash_ids": [0, 1]}
{"input_toks": 40, "output_toks": 7, "arrival_time_ns": 347938951, "block16_hash_ids": [0, 2, 9]}
{"input_toks": 9, "output_toks": 1, "arrival_time_ns": 347938951, "block16_hash_ids": []}
"""
PLAIN_CSV = "arrival,prompt_tokens,output_tokens\n10.5,3,4\n10.5,0,1\n12,7,2\n"
PLAIN_JSONL = '{"prompt_tokens": 3, "output_tokens": 4}\n{"prompt_tokens": 0, "output_tokens": 1, "note": "x"}\n'

ROWS = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(0, 10**9), st.integers(1, 10**9)), min_size=1, max_size=30
).map(sorted)


def read(tmp_path: Path, content: str | bytes, name: str = "trace.csv", format: str = "auto") -> Trace:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_trace(path, format)  # type: ignore[arg-type]


def arrivals(trace: Trace) -> list[float]:
    assert trace.arrivals.dtype == np.float64
    return trace.arrivals.tolist()


def lengths(trace: Trace) -> list[tuple[int, int]]:
    assert trace.prefill_tokens.dtype == trace.decode_tokens.dtype == np.int64
    return list(zip(trace.prefill_tokens.tolist(), trace.decode_tokens.tolist(), strict=True))


NS = '{{"input_toks": 1, "output_toks": 1, "arrival_time_ns": {}}}\n'
RUN = '{{"input_toks": 7, "output_toks": {}, "arrival_time": {}, "queued_ts": 5.5, "last_token_ts": 9.5}}\n'
BLOCKS = ((0, 1), (0, 2, 9), ())


@pytest.mark.parametrize(
    ("content", "times", "rows", "blocks", "block_tokens"),
    [
        (AZURE, [0.0, 2e-7, 1.5000001], [(374, 44), (0, 109), (879, 1)], None, None),
        (MOONCAKE, [0.0, 0.0, 3.001], [(1025, 500), (512, 1), (3, 9)], ((0, 1, 2), (0,), ()), 512),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n', [0.0], [(2, 3)], None, None),
        (VLLM_BENCH, [0.0, 301012143 / 1e9, 301012143 / 1e9], [(33, 5), (40, 7), (9, 1)], BLOCKS, 16),
        (NS.format("1e9") + NS.format("2500000000.0"), [0.0, 1.5], [(1, 1)] * 2, None, None),
        ("input_toks,output_toks,arrival_time_ns\n1,1,5\n1,1,1005\n", [0.0, 1e-6], [(1, 1)] * 2, None, None),
        (RUN.format(2, 1777142838.25) + RUN.format(3, 1777142839.5), [0.0, 1.25], [(7, 2), (7, 3)], None, None),
        (LENGTHS, None, [(74, 918), (290, 905)], None, None),
        (PLAIN_CSV, [0.0, 0.0, 1.5], [(3, 4), (0, 1), (7, 2)], None, None),
        (PLAIN_JSONL, None, [(3, 4), (0, 1)], None, None),
        ('{"prompt_tokens": 12.0, "output_tokens": 3e2}', None, [(12, 300)], None, None),
    ],
)
def test_each_format_has_these_columns(
    tmp_path: Path, content: str, times: list[float] | None, rows: list[tuple[int, int]], blocks: object,
    block_tokens: int | None,
) -> None:  # fmt: skip
    trace = read(tmp_path, content)
    assert times is trace.arrivals is None or arrivals(trace) == times
    assert lengths(trace) == rows
    assert trace.prefix_blocks == blocks
    assert (trace.name, trace.prefix_block_tokens) == ("trace", block_tokens)


def test_nanoseconds_since_1970_lose_nothing(tmp_path: Path) -> None:
    """A float holds such a time to the nearest 256 ns."""
    rows = [1_777_142_838_338_653_001, 1_777_142_838_338_653_002, 1_777_142_839_338_653_001]
    assert arrivals(read(tmp_path, "".join(map(NS.format, rows)))) == [0.0, 1e-9, 1.0]


@pytest.mark.parametrize(
    "stamps",
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.009930+00:00"),
        ("2024-02-29T23:59:59Z", "2024-03-01T00:00:00Z"),
        (" 2024-12-31 23:59:59.5 ", "2025-01-01 00:00:00.500000000"),
    ],
)
def test_azure_dates_of_other_years_are_read_too(tmp_path: Path, stamps: tuple[str, str]) -> None:
    content = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{stamp},5,6\n" for stamp in stamps)
    assert arrivals(read(tmp_path, content)) == [0.0, 1.0]


CONTENTS = {
    "azure": AZURE,
    "mooncake": MOONCAKE,
    "vllm-bench": VLLM_BENCH,
    "lengths": LENGTHS,
    "plain": PLAIN_CSV,
    "plain JSON": PLAIN_JSONL,
}
REWRITTEN: dict[str, Callable[[str], bytes]] = {
    "gzip": lambda text: gzip.compress(text.encode()),
    "gzip in two members": lambda text: gzip.compress(text[:50].encode()) + gzip.compress(text[50:].encode()),
    "byte order mark": lambda text: text.encode("utf-8-sig"),
    "carriage returns": lambda text: text.replace("\n", "\r\n").encode(),
    "no newline at the end": lambda text: text.rstrip("\n").encode(),
    "blank lines": lambda text: ("\n  \n" + text.replace("\n", "\n\n \n")).encode(),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("rewrite", REWRITTEN.values(), ids=REWRITTEN.keys())
@pytest.mark.parametrize("name", ["trace.csv", "trace.unknown"])
def test_the_wrapping_of_a_file_changes_nothing(
    tmp_path: Path, content: str, rewrite: Callable[[str], bytes], name: str
) -> None:
    plain, wrapped = read(tmp_path, content), read(tmp_path, rewrite(content), name)
    assert lengths(plain) == lengths(wrapped)
    assert plain.prefix_blocks == wrapped.prefix_blocks
    assert (plain.arrivals is None) == (wrapped.arrivals is None)
    if plain.arrivals is not None:
        assert arrivals(plain) == arrivals(wrapped)


@pytest.mark.parametrize("name", ["w.csv", "w.csv.gz", "w.jsonl.gz", "w.gz", "w"])
def test_the_name_is_the_file_without_its_endings(tmp_path: Path, name: str) -> None:
    content = gzip.compress(LENGTHS.encode()) if name.endswith("gz") else LENGTHS
    assert read(tmp_path, content, name).name == "w"


def test_a_named_format_decides_where_two_would_fit(tmp_path: Path) -> None:
    content = "prompt_tokens,output_tokens,num_prefill_tokens,num_decode_tokens\n1,2,3,4\n"
    assert lengths(read(tmp_path, content, format="plain")) == [(1, 2)]
    assert lengths(read(tmp_path, content, format="lengths")) == [(3, 4)]


@pytest.mark.parametrize("cell", ["12", " 12", "+12", "12.0", "1.2e1", "12.", '"12"', "012"])
def test_one_number_in_many_spellings(tmp_path: Path, cell: str) -> None:
    """Each beside a plain 5, and beside a spelling that makes the whole column be read cell by cell."""
    for neighbour in ("5", " 5 "):
        trace = read(tmp_path, f"output_tokens , prompt_tokens\n{cell},{cell}\n{neighbour},5\n")
        assert lengths(trace) == [(12, 12), (5, 5)]


def write_csv(rows: list[tuple[float, int, int]]) -> str:
    return "arrival,prompt_tokens,output_tokens\n" + "".join(f"{a!r},{p},{d}\n" for a, p, d in rows)


def write_jsonl(rows: list[tuple[float, int, int]]) -> str:
    return "\n".join(json.dumps({"arrival": a, "prompt_tokens": p, "output_tokens": d}) for a, p, d in rows)


@pytest.mark.parametrize("write", [write_csv, write_jsonl])
@given(rows=ROWS)
def test_what_was_written_comes_back(write: Callable[[list[tuple[float, int, int]]], str], rows) -> None:
    with TemporaryDirectory() as folder:
        trace = read(Path(folder), write(rows))
    assert arrivals(trace) == [arrival - rows[0][0] for arrival, _, _ in rows]
    assert lengths(trace) == [(prompt, output) for _, prompt, output in rows]


def test_a_trace_becomes_requests(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    first, second, third = trace.requests(model="chat")
    assert [first.id, second.id, third.id] == [0, 1, 2]
    assert [first.arrival, second.arrival, third.arrival] == [0.0, 0.0, 3.001]
    assert [first.prompt_tokens, second.prompt_tokens, third.prompt_tokens] == [1025, 512, 3]
    assert (first.model, first.prefix_blocks, third.prefix_blocks) == ("chat", (0, 1), ()), (
        "1025 tokens fill two blocks"
    )
    assert type(first.arrival) is float
    assert type(first.prompt_tokens) is type(first.max_tokens) is int


def test_requests_do_not_tell_how_long_their_answers_will_be(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    assert {request.max_tokens for request in trace.requests()} == {109}
    assert {request.max_tokens for request in trace.requests(max_tokens=4096)} == {4096}
    with pytest.raises(BadInput, match=r"^max_tokens: got 108, expected at least the longest answer .*109"):
        trace.requests(max_tokens=108)


def test_a_trace_becomes_a_joint_distribution(tmp_path: Path) -> None:
    pairs = read(tmp_path, PLAIN_CSV).pairs()
    assert pairs.prefill_values.tolist() == [3, 0, 7]
    assert pairs.decode_values.tolist() == [4, 1, 2]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((None, [1, 2], [1]), "decode_tokens: got 1, expected 2 rows"),
        (([0.0], [1, 2], [1, 1]), "arrivals: got 1, expected 2 rows"),
        ((None, [1, 2], [1, 1], ((1,),), 16), "prefix_blocks: got 1, expected 2 rows"),
        ((None, [1], [1], ((1,),)), "expected both of prefix_blocks and prefix_block_tokens"),
        ((None, [1], [0]), r"decode_tokens\[0\]: got 0"),
        (([1.0, 0.5], [1, 2], [1, 1]), r"arrivals\[1\]: got 0.5"),
        ((None, [], []), "prefill_tokens: "),
    ],
)
def test_columns_must_fit_together(columns: tuple, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Trace("mine", *columns)


def test_the_public_azure_trace_is_read_as_a_plain_loop_reads_it(public_trace) -> None:
    path = public_trace("azure_llm_2023_conv.csv.gz")
    trace = read_trace(path)
    with gzip.open(path, "rt") as lines:
        rows = list(csv.DictReader(lines))
    assert (trace.name, len(trace)) == ("azure_llm_2023_conv", 19_366)
    assert lengths(trace) == [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    start = datetime.fromisoformat(rows[0]["TIMESTAMP"][:26])
    loop = [(datetime.fromisoformat(row["TIMESTAMP"][:26]) - start).total_seconds() for row in rows]
    assert np.abs(np.array(loop) - trace.arrivals).max() < 1.1e-6


def test_the_public_mooncake_trace_is_read_as_a_plain_loop_reads_it(public_trace) -> None:
    path = public_trace("mooncake_conversation.jsonl.gz")
    trace = read_trace(path)
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(trace) == len(rows) == 12_031
    assert lengths(trace) == [(row["input_length"], row["output_length"]) for row in rows]
    assert arrivals(trace) == [row["timestamp"] / 1000 for row in rows]
    assert trace.prefix_blocks == tuple(tuple(row["hash_ids"]) for row in rows)
