"""Records as Parquet files: columns of one length, one row a request or a step."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reports.records.run_directory import naming, replacing


def write_columns(file: Path, columns: Mapping[str, Any]) -> None:
    """Write columns of one length atomically; makes the folder."""
    import pyarrow as pa
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as draft:
        parquet.write_table(pa.table(dict(columns)), draft, compression="zstd")


def read_columns(file: Path) -> dict[str, list[Any]]:
    """The columns that `write_columns` wrote.

    Raises:
        OSError: it cannot be read, or is no Parquet file.
    """
    from pyarrow import ArrowInvalid, parquet

    with naming(file):
        try:
            found: dict[str, list[Any]] = parquet.read_table(file).to_pydict()
        except ArrowInvalid as error:
            raise OSError(errno.EINVAL, "is no Parquet file", str(file)) from error
    return found
