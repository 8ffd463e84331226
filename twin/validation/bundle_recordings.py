"""Measured runs of bundles, kept in the run folder, so that a killed validation repeats nothing.

profiling/ratio-4-repeat-2/stretches.parquet   one row a stretch of a role's work: rank, kind, features, seconds
live/ratio-4-repeat-2/requests.parquet       one row a completed request: its number, tokens, first and last token
live/ratio-4-repeat-2/steps.parquet          one row a step of a microbatch: its end and its tokens
live/ratio-4-repeat-2/roles.parquet          one row an instance: busy and elapsed seconds
live/ratio-4-repeat-2/transfers.parquet      messages, bytes and seconds, from attention to the FFN and back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from reports.bundle_metrics import BundleTimes, Transfers
from reports.records.columns import read_columns, write_columns
from twin.afd.role_bundle import FEATURES
from twin.afd.role_times import TimedStretch
from workloads.errors import BadInput

REQUESTS = ("ids", "tokens", "first_token", "finish")


def write_times(folder: Path, times: BundleTimes) -> None:
    """Write the files of a live run.

    Raises:
        OSError: a file that cannot be written.
    """
    write_columns(folder / "requests.parquet", {name: getattr(times, name) for name in REQUESTS})
    write_columns(folder / "steps.parquet", {"end": times.step_ends, "tokens": times.step_tokens})
    instances = np.concatenate([times.attention, times.ffn])
    names = ["attention"] * len(times.attention) + ["ffn"] * len(times.ffn)
    write_columns(folder / "roles.parquet", {"role": names, "busy": instances[:, 0], "elapsed": instances[:, 1]})
    ways = [asdict(times.attention_to_ffn), asdict(times.ffn_to_attention)]
    write_columns(folder / "transfers.parquet", {name: [way[name] for way in ways] for name in ways[0]})


def read_times(folder: Path) -> BundleTimes:
    """Read the files that `write_times` wrote.

    Raises:
        OSError: a file that cannot be read.
    """
    requests = {name: np.array(values) for name, values in read_columns(folder / "requests.parquet").items()}
    steps, roles = read_columns(folder / "steps.parquet"), read_columns(folder / "roles.parquet")
    columns = read_columns(folder / "transfers.parquet")
    busy_and_elapsed = np.array([roles["busy"], roles["elapsed"]]).T
    is_attention = np.array(roles["role"]) == "attention"
    there, back = (Transfers(*row) for row in zip(*columns.values(), strict=True))
    return BundleTimes(
        **requests,
        step_ends=np.array(steps["end"]),
        step_tokens=np.array(steps["tokens"]),
        attention=busy_and_elapsed[is_attention],
        ffn=busy_and_elapsed[~is_attention],
        attention_to_ffn=there,
        ffn_to_attention=back,
    )


def write_stretches(folder: Path, stretches: Sequence[TimedStretch]) -> None:
    """Write the stretches of a part of the profiling.

    Raises:
        OSError: a file that cannot be written.
    """
    rank, kind, features, seconds = zip(*stretches, strict=True)
    columns = {"rank": rank, "kind": kind, "features": [list(each) for each in features], "seconds": seconds}
    write_columns(folder / "stretches.parquet", {name: list(column) for name, column in columns.items()})


def read_stretches(folder: Path) -> list[TimedStretch]:
    """Read the file that `write_stretches` wrote.

    Raises:
        BadInput: stretches of a version with other features.
        OSError: a file that cannot be read.
    """
    file = folder / "stretches.parquet"
    columns = read_columns(file)
    rows = zip(columns["rank"], columns["kind"], columns["features"], columns["seconds"], strict=True)
    stretches = [TimedStretch(rank, kind, tuple(features), seconds) for rank, kind, features, seconds in rows]
    for each in stretches:
        if len(each.features) != len(FEATURES.get(each.kind, ())):
            expected = "expected the features of this version; --fresh profiles anew"
            raise BadInput(expected, field=each.kind, value=list(each.features), file=file)
    return stretches
