"""Traces that cannot be read: always `BadInput`, naming the file, the line, the column and the value."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.errors import BadInput
from workloads.traces import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
PLAIN = "arrival,prompt_tokens,output_tokens\n1,3,4\n"
PLAIN_ROW = '{"arrival": 1, "prompt_tokens": 3, "output_tokens": 4}\n'
MOONCAKE = '{"timestamp": 5, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}\n'
VLLM_BENCH = '{"input_toks": 40, "output_toks": 4, "arrival_time_ns": 5, "block16_hash_ids": [0, 1]}\n'
AT_LEAST = "expected a whole number from {} to 1000000000"


def refusal(folder: Path, content: str | bytes, name: str = "bad.trace", format: str = "auto") -> BadInput:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadInput) as error:
        read_trace(path, format)  # type: ignore[arg-type]
    assert str(error.value).startswith(str(path)), "the message names the file first"
    assert "\n" not in str(error.value)
    return error.value


def azure(stamp: str, context: str, generated: str) -> str:
    return AZURE + f"{stamp},{context},{generated}\n"


def one_more(row: str, key: str, value: str) -> str:
    """A JSON row, and the same with another cell, as JSON text."""
    cells = {name: json.dumps(cell) for name, cell in json.loads(row).items()} | {key: value}
    return row + "{" + ", ".join(f'"{name}": {cell}' for name, cell in cells.items()) + "}\n"


mooncake, vllm_bench = partial(one_more, MOONCAKE), partial(one_more, VLLM_BENCH)


NANOSECONDS = "a whole number of nanoseconds, 0 or more"
NOW = "2023-11-16 18:15:47"
CELLS = [
    # content, line, column, value as shown, what was expected
    (azure(NOW, "-1", "4"), 3, "ContextTokens", "'-1'", AT_LEAST.format(0)),
    (azure(NOW, "3.5", "4"), 3, "ContextTokens", "'3.5'", AT_LEAST.format(0)),
    (azure(NOW, "", "4"), 3, "ContextTokens", "''", AT_LEAST.format(0)),
    (azure(NOW, "1_000", "4"), 3, "ContextTokens", "'1_000'", AT_LEAST.format(0)),
    (azure(NOW, "٣", "4"), 3, "ContextTokens", "'٣'", AT_LEAST.format(0)),
    (azure(NOW, "1000000001", "4"), 3, "ContextTokens", "'1000000001'", AT_LEAST.format(0)),
    (azure(NOW, "9" * 5000, "4"), 3, "ContextTokens", "'999", AT_LEAST.format(0)),
    (azure(NOW, "1", "0"), 3, "GeneratedTokens", "'0'", AT_LEAST.format(1)),
    (azure("2023-11-16 18:15:46.67", "1", "4"), 3, "TIMESTAMP", "'2023-11-16 18:15:46.67'", "no earlier"),
    (azure("2023-13-16 18:15:47", "1", "4"), 3, "TIMESTAMP", "'2023-13-16", "a UTC date and time"),
    (azure("2023-02-29 18:15:47", "1", "4"), 3, "TIMESTAMP", "'2023-02-29", "a UTC date and time"),
    (azure("2023-11-16", "1", "4"), 3, "TIMESTAMP", "'2023-11-16'", "a UTC date and time"),
    (azure("9999-11-16 18:15:47", "1", "4"), 3, "TIMESTAMP", "'9999-11-16", "a UTC date and time"),
    (azure("2023-11-16 18:15:47+02:00", "1", "4"), 3, "TIMESTAMP", "'2023-11-16", "a UTC date and time"),
    (azure("1700158547", "1", "4"), 3, "TIMESTAMP", "'1700158547'", "a UTC date and time"),
    (PLAIN + "0.5,3,4\n", 3, "arrival", "'0.5'", "no earlier than that of the row before"),
    (PLAIN + "nan,3,4\n", 3, "arrival", "'nan'", "a finite time, 0 or later"),
    (PLAIN + "1e999,3,4\n", 3, "arrival", "'1e999'", "a finite time, 0 or later"),
    (PLAIN + "--1,3,4\n", 3, "arrival", "'--1'", "a finite time, 0 or later"),
    (PLAIN + "2,3,0\n", 3, "output_tokens", "'0'", AT_LEAST.format(1)),
    (PLAIN + "\n\n2,3,-4\n", 5, "output_tokens", "'-4'", AT_LEAST.format(1)),
    (PLAIN + '"2","a\nb",4\n', 4, "prompt_tokens", "'a\\nb'", AT_LEAST.format(0)),
    (mooncake("timestamp", "4"), 2, "timestamp", "4", "no earlier than that of the row before"),
    (mooncake("timestamp", "NaN"), 2, "timestamp", "nan", "a finite time, 0 or later"),
    (mooncake("timestamp", "1" + "0" * 400), 2, "timestamp", "1000", "a finite time, 0 or later"),
    (mooncake("timestamp", "null"), 2, "timestamp", "'null'", "a finite time, 0 or later"),
    (mooncake("input_length", "true"), 2, "input_length", "True", AT_LEAST.format(0)),
    (mooncake("input_length", '"600"'), 2, "input_length", "'600'", AT_LEAST.format(0)),
    (mooncake("input_length", "[600]"), 2, "input_length", "[600]", AT_LEAST.format(0)),
    (mooncake("output_length", "0"), 2, "output_length", "0", AT_LEAST.format(1)),
    (mooncake("hash_ids", "[0, 1, 2]"), 2, "hash_ids", "[0, 1, 2]", "at most one id for every 512 tokens"),
    (mooncake("hash_ids", "[0, -1]"), 2, "hash_ids", "[0, -1]", "a list of whole numbers, 0 or more"),
    (mooncake("hash_ids", "[true]"), 2, "hash_ids", "[True]", "a list of whole numbers, 0 or more"),
    (mooncake("hash_ids", "[1.0]"), 2, "hash_ids", "[1.0]", "a list of whole numbers, 0 or more"),
    (mooncake("hash_ids", "null"), 2, "hash_ids", "'null'", "a list of whole numbers, 0 or more"),
    (vllm_bench("arrival_time_ns", "4"), 2, "arrival_time_ns", "4", "no earlier than that of the row before"),
    (vllm_bench("arrival_time_ns", "7.5"), 2, "arrival_time_ns", "7.5", NANOSECONDS),
    (vllm_bench("arrival_time_ns", "9223372036854775808"), 2, "arrival_time_ns", "9223372036854775808", NANOSECONDS),
    (vllm_bench("arrival_time_ns", '"7"'), 2, "arrival_time_ns", "'7'", NANOSECONDS),
    (vllm_bench("block16_hash_ids", "[0, 1, 2, 3]"), 2, "block16_hash_ids", "[0, 1, 2, 3]", "for every 16 tokens"),
    (PLAIN_ROW + "\n" + PLAIN_ROW.replace("4", "-4"), 3, "output_tokens", "-4", AT_LEAST.format(1)),
]


@pytest.mark.parametrize(("content", "line", "column", "value", "expected"), CELLS)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_bad_cell_is_named(
    tmp_path: Path, content: str, line: int, column: str, value: str, expected: str, zipped: bool
) -> None:
    error = refusal(tmp_path, gzip.compress(content.encode()) if zipped else content)
    assert (error.line, error.field) == (line, column)
    assert f"bad.trace:{line}: {column}: got {value}" in str(error)
    assert expected in str(error)


LACKS = "expected this column, found only"
ODD_KEY = "expected this key on every line or on none, found it on line"
NO_ARRIVAL = '{"prompt_tokens": 3, "output_tokens": 4}\n'
ROWS = [
    # content, line, part of the message
    (PLAIN + "1,2\n", 3, "number of fields: got 2, expected 3 (arrival, prompt_tokens, output_tokens)"),
    (PLAIN + "1,2,3,4\n", 3, "number of fields: got 4, expected 3"),
    (PLAIN + '1,2,"3\n', 3, "row: expected comma-separated fields (unexpected end of data)"),
    (PLAIN + '1,2,"3"4\n', 3, "row: expected comma-separated fields"),
    (PLAIN + "1,2," + "3" * 200_000, 3, "row: expected comma-separated fields (field larger"),
    ("prompt_tokens,output_tokens,prompt_tokens\n1,2,3\n", 1, "prompt_tokens: expected each column once"),
    ("prompt_tokens,output_tokens\n", 1, "expected rows below the header, found none"),
    ("\n\nprompt_tokens,output_tokens\n\n", 3, "expected rows below the header, found none"),
    ("prompt_tokens,tokens\n1,2\n", 1, f"output_tokens: {LACKS} prompt_tokens, tokens"),
    ("TIMESTAMP,GeneratedTokens\n1,2\n", 1, f"ContextTokens: {LACKS} TIMESTAMP, GeneratedTokens"),
    ("ContextTokens,GeneratedTokens\n1,2\n", 1, f"TIMESTAMP: {LACKS} ContextTokens, GeneratedTokens"),
    ("time,size\n1,2\n", 1, "expected the columns of a known format (azure: TIMESTAMP, ContextTokens"),
    ('\n{"time": 1}\n', 2, "expected the columns of a known format"),
    ("{}\n", 1, "expected the columns of a known format"),
    (PLAIN_ROW + '{"prompt_tokens": 3}', 2, f"output_tokens: {LACKS} prompt_tokens"),
    (PLAIN_ROW + "{}", 2, f"prompt_tokens: {LACKS} none"),
    (PLAIN_ROW + NO_ARRIVAL, 2, f"arrival: {ODD_KEY} 1 but not here"),
    (NO_ARRIVAL + "\n" + PLAIN_ROW, 1, f"arrival: {ODD_KEY} 3 but not here"),
    (MOONCAKE + MOONCAKE.replace("hash_ids", "ids"), 2, f"hash_ids: {ODD_KEY} 1"),
    ('{"input_toks": 4, "output_toks": 4}', 1, f"arrival_time_ns: {LACKS} input_toks, output_toks"),
    (VLLM_BENCH + VLLM_BENCH.replace("block16_hash_ids", "ids"), 2, f"block16_hash_ids: {ODD_KEY} 1"),
    (PLAIN_ROW + PLAIN_ROW[:-8], 2, 'row: got \'{"arrival": 1,'),
    (PLAIN_ROW + PLAIN_ROW[:-8], 2, "expected a JSON object, found broken JSON at character"),
    (PLAIN_ROW + PLAIN_ROW.strip() + PLAIN_ROW, 2, "found broken JSON at character 55 (Extra data)"),
    (PLAIN_ROW + "3", 2, "row: got '3', expected a JSON object"),
    ("[" + PLAIN_ROW.strip() + "]", 1, "expected a JSON object"),
    (PLAIN_ROW + "[" * 200_000, 2, "expected a JSON object"),
    (PLAIN_ROW + '{"arrival": ' + "1" * 5000 + "}", 2, "expected a JSON object without huge numbers"),
    (b"arrival,prompt_tokens\n1,\xff\n", 2, "got b'\\xff', expected UTF-8 text"),
    (PLAIN.encode("utf-16"), 1, "expected UTF-8 text"),
]


@pytest.mark.parametrize(("content", "line", "message"), ROWS)
def test_a_bad_row_is_named(tmp_path: Path, content: str | bytes, line: int, message: str) -> None:
    error = refusal(tmp_path, content)
    assert f"bad.trace:{line}: " in str(error)
    assert message in str(error)


@pytest.mark.parametrize("content", ["", "\n", " \r\n\t\n", "\ufeff", '""\n', gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_refused(tmp_path: Path, content: str | bytes) -> None:
    assert "expected a trace, found an empty file" in str(refusal(tmp_path, content))


WHOLE = gzip.compress(PLAIN.encode() * 50, mtime=0)


@pytest.mark.parametrize(
    "content",
    [WHOLE[:40], WHOLE[:-4], WHOLE[:2], WHOLE[:20] + b"\0\0\0" + WHOLE[23:], WHOLE[:-8] + b"\0" * 8],
    ids=["cut", "no length", "magic only", "damaged", "wrong checksum"],
)
def test_a_corrupt_gzip_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "expected a whole gzip file (" in str(refusal(tmp_path, content))


def test_a_name_that_says_gzip_is_held_to_it(tmp_path: Path) -> None:
    assert "expected a whole gzip file (Not a gzipped file" in str(refusal(tmp_path, PLAIN, "bad.csv.gz"))


def test_no_file_a_directory_and_no_name_at_all(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "none.csv", "found nothing there"),
        (tmp_path, "found a directory"),
        (tmp_path / ("x" * 5000), "expected a file that can be read"),
        (tmp_path / "a\0b", "expected a file that can be read"),
    ):
        with pytest.raises(BadInput) as error:
            read_trace(path)
        assert reason in str(error.value)
        assert error.value.file == str(path)


@pytest.mark.parametrize(
    ("failure", "reason"), [(PermissionError(13, "no"), "permission is denied"), (OSError(5, "I/O error"), "I/O error")]
)
def test_a_file_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError, reason: str
) -> None:
    """Simulated, because the administrator may read every file."""

    def refuse(path: Path, mode: str) -> IO[bytes]:
        raise failure

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BadInput, match=f"expected a file that .*{reason}"):
        read_trace(tmp_path / "locked.csv")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^format: got 'excel', expected one of auto, azure, burstgpt, mooncake,"):
        read_trace(tmp_path / "t.csv", "excel")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "format", "column"),
    [(AZURE, "mooncake", "input_length"), (MOONCAKE, "azure", "ContextTokens"), (PLAIN, "lengths", "num_prefill")],
)
def test_a_wrong_format_is_answered_with_the_columns_found(
    tmp_path: Path, content: str, format: str, column: str
) -> None:
    message = str(refusal(tmp_path, content, format=format))
    assert f"bad.trace:1: {column}" in message
    assert "found only " in message


ODD_CELL = st.text(st.characters(exclude_characters='0123456789,"\r\n', exclude_categories=["Cs"]), max_size=6)


@given(cell=ODD_CELL, column=st.integers(0, 2), row=st.integers(0, 4), zipped=st.booleans())
def test_a_cell_without_a_digit_is_always_refused_and_named(cell: str, column: int, row: int, zipped: bool) -> None:
    cells = [["1", "3", "4"] for _ in range(5)]
    cells[row][column] = cell
    content = PLAIN + "\n".join(map(",".join, cells))
    with TemporaryDirectory() as folder:
        error = refusal(Path(folder), gzip.compress(content.encode()) if zipped else content)
    assert error.line == 3 + row
    assert error.field == ("arrival", "prompt_tokens", "output_tokens")[column]


@given(
    content=st.sampled_from([AZURE * 2, AZURE, PLAIN, PLAIN_ROW * 2, MOONCAKE * 2, VLLM_BENCH * 2]).map(str.encode),
    zipped=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3), st.binary(max_size=3)), max_size=4),
)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    content: bytes, zipped: bool, changes: list[tuple[int, int, bytes]]
) -> None:
    if zipped:
        content = gzip.compress(content)
    for place, removed, added in changes:
        content = content[:place] + added + content[place + removed :]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "damaged"
        path.write_bytes(content)
        with suppress(BadInput):
            trace = read_trace(path)
            assert len(trace) == len(trace.requests()) >= 1
            assert trace.prefill_tokens.min() >= 0
            assert trace.decode_tokens.min() >= 1


def test_gigabytes_of_blank_lines_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    packed = gzip.compress(b"\n" * 10_000_000)
    tracemalloc.start()
    try:
        error = refusal(tmp_path, packed, "blank.csv.gz")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.line, error.expected) == (100_001, "expected at most 100000 blank lines on end")
    assert peak < 20_000_000


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    error = refusal(tmp_path, gzip.compress(PLAIN.encode() + b"1" * 40_000_000))
    assert (error.line, error.expected) == (3, "expected lines of at most 16777216 bytes")


def test_more_rows_than_memory_has_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.trace_files.MAX_ROWS", 10)
    error = refusal(tmp_path, PLAIN_ROW * 6 + "\n" + PLAIN_ROW * 6)
    assert (error.line, error.expected) == (12, "expected at most 10 lines that are not blank")
