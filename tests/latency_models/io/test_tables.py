"""CSV tables, plain or gzipped, and what can be wrong with them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from latency_models.io.files import read_columns
from workloads.errors import BadInput

TEXT = "name,count,size\na,1,2.5\n\nb,8.0,\n"


@pytest.mark.parametrize(
    "data", [TEXT.encode(), gzip.compress(TEXT.encode(), mtime=0), b"\xef\xbb\xbf" + TEXT.encode()]
)
def test_columns_by_name_from_plain_and_gzipped_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "table"
    path.write_bytes(data)
    table = read_columns(path)
    assert (len(table), table.names) == (2, ("name", "count", "size"))
    assert table.text("name") == ["a", "b"]
    assert table.wholes("count", low=1) == [1, 8]
    assert table.numbers("size", blank=0.0) == [2.5, 0.0]


def test_a_fault_names_the_line_that_an_editor_shows(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(TEXT)
    table = read_columns(path)
    with pytest.raises(BadInput, match=r"table.csv:4: size: got '', expected a finite number$"):
        table.numbers("size")
    with pytest.raises(BadInput, match=r"table.csv:2: count: got '1', expected a whole number of at least 2"):
        table.wholes("count", low=2)
    with pytest.raises(BadInput, match=r"table.csv:2: size: got '2.5', expected a whole number of at least 0"):
        table.wholes("size", low=0, blank=0)
    with pytest.raises(BadInput, match=r"table.csv:2: size: got '2.5', expected a finite number above 3"):
        table.numbers("size", above=3)
    with pytest.raises(BadInput, match=r"table.csv:1: weight: expected this column, found name, count, size"):
        table.text("weight")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a header and rows below it"),
        (b"a,b\n", "expected a header and rows below it"),
        (b"a,a\n1,2\n", r":1: got 'a', expected each column once"),
        (b"a,b\n1,2\n1\n", r":3: got 1, expected 2 cells, one a column"),
        (b'a,b\n"1,2\n', r"expected a CSV file: unexpected end of data"),
        (b"\xff\xfe", "expected a text file in UTF-8"),
        (b"\x1f\x8b\x08", "expected a whole gzip file"),
    ],
)
def test_a_file_that_will_not_do_is_told_in_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=message) as error:
        read_columns(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["absent.csv", ".", "a\0b"])
def test_a_path_that_cannot_be_read_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"expected a (readable file|path)"):
        read_columns(tmp_path / name)
