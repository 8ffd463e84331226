"""Per-request records as a Parquet file: one row a request that finished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reports.records.run_directory import naming


def write_requests(file: Path, columns: Mapping[str, Any]) -> None:
    """Write columns of one length, making the folder; whole or not at all."""
    import pyarrow as pa
    from pyarrow import parquet

    with naming(file):
        file.parent.mkdir(exist_ok=True)
        draft = file.with_name(file.name + ".part")
        parquet.write_table(pa.table(dict(columns)), draft, compression="zstd")
        draft.replace(file)
