"""Records as Parquet files: columns of one length, one row a request or a step."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reports.records.run_directory import naming, replacing


def write_columns(file: Path, columns: Mapping[str, Any]) -> None:
    """Write columns of one length atomically; makes the folder."""
    with writing_columns(file) as write:
        write(columns)


@contextlib.contextmanager
def writing_columns(file: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that appends columns of one length; the file is there at the end of the block, or not at all.

    Each call has the columns of the first, and writes a row group. `OSError` with a path if the disk is full.
    """
    import pyarrow as pa
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        writer = None

        def write(columns: Mapping[str, Any]) -> None:
            nonlocal writer
            table = pa.table({name: _arrow(column) for name, column in columns.items()})
            if writer is None:
                draft = opened.enter_context(replacing(file))
                texts = [field.name for field in table.schema if field.type == pa.string()]
                options = {"compression": "zstd", "use_dictionary": texts}  # of times, a dictionary saves nothing
                writer = opened.enter_context(parquet.ParquetWriter(draft, table.schema, **options))
            writer.write_table(table)

        yield write


def read_columns(file: Path) -> dict[str, list[Any]]:
    """The columns that `write_columns` wrote; `OSError` if it cannot be read, or is no Parquet file."""
    from pyarrow import ArrowInvalid, parquet

    with naming(file):
        try:
            columns: dict[str, list[Any]] = parquet.read_table(file).to_pydict()
        except ArrowInvalid as error:
            raise OSError(errno.EINVAL, "is no Parquet file", str(file)) from error
    return columns


def _arrow(column: Any) -> Any:
    """A column as Arrow data; pyarrow's own conversion loads pandas, which takes longer than many a simulation."""
    import numpy as np
    import pyarrow as pa

    if not isinstance(column, np.ndarray) or column.ndim != 1:
        return column
    size, kind = len(column), column.dtype.str
    if kind in ("<f8", "<i8"):
        number = pa.float64() if kind == "<f8" else pa.int64()
        return pa.Array.from_buffers(number, size, [None, pa.py_buffer(np.ascontiguousarray(column))])
    if column.dtype == np.bool_:
        bits = np.packbits(column, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), size, [None, pa.py_buffer(bits)])
    if column.dtype.kind == "U":
        texts = [text.encode() for text in column.tolist()]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        return pa.Array.from_buffers(pa.string(), size, [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    return column
