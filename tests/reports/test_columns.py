"""Parquet files of records: values and types survive, and pandas is not loaded for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from reports.run_directory import read_columns, write_columns, writing_columns

COLUMNS = {
    "seconds": np.array([0.1, -0.0, 2.0**-1074]),
    "id": np.array([1, -(2**62), 3]),
    "every_second_id": np.arange(6)[::2],
    "one_shot": np.array([True, False, True]),
    "model": np.array(["llama", "", "größer"]),
    "small": np.array([1, 2, 3], dtype=np.int16),
    "lengths": [[1], [2, 3], []],
}


def test_values_and_types_are_those_of_pyarrow(tmp_path: Path) -> None:
    write_columns(tmp_path / "a.parquet", COLUMNS)
    assert parquet.read_table(tmp_path / "a.parquet").equals(pa.table(COLUMNS))


def test_more_rows_than_a_byte_of_booleans_has(tmp_path: Path) -> None:
    flags = np.arange(1000) % 3 == 0
    write_columns(tmp_path / "a.parquet", {"flag": flags, "name": flags.astype(str)})
    assert read_columns(tmp_path / "a.parquet") == {"flag": flags.tolist(), "name": flags.astype(str).tolist()}


def test_no_rows(tmp_path: Path) -> None:
    empty = {name: column[:0] for name, column in COLUMNS.items() if isinstance(column, np.ndarray)}
    write_columns(tmp_path / "a.parquet", empty)
    assert parquet.read_table(tmp_path / "a.parquet").equals(pa.table(empty))


def test_writing_does_not_load_pandas(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np; from pathlib import Path; from reports.run_directory import write_columns; "
        "write_columns(Path(sys.argv[1]), dict(a=np.array([1.0]), b=np.array([1]), c=np.array(['x']), "
        "d=np.array([True]))); print('pandas' in sys.modules)"
    )
    line = [sys.executable, "-c", program, str(tmp_path / "a.parquet")]
    assert subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip() == "False"


def test_parts_follow_each_other(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.parquet"
    with writing_columns(file) as write:
        write({"n": np.arange(3), "name": np.array(["a", "b", "c"])})
        write({"n": np.arange(3, 5), "name": np.array(["longer", "b"])})
        assert not file.exists()
    assert read_columns(file) == {"n": [0, 1, 2, 3, 4], "name": ["a", "b", "c", "longer", "b"]}
    assert parquet.ParquetFile(file).num_row_groups == 2


def test_a_block_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> None:
        with writing_columns(tmp_path / "a.parquet") as write:
            write({"n": np.arange(3)})
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_block_without_parts_leaves_no_file(tmp_path: Path) -> None:
    with writing_columns(tmp_path / "a.parquet"):
        pass
    assert not list(tmp_path.iterdir())
