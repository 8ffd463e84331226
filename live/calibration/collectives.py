"""All-reduces among processes of this machine over gloo, as a link file that a scenario's `communication` can name."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from latency_models.sources.kernel_tables.settings import AllReduces, LinkFile
from live.calibration.journal import Journal
from live.device import device_name

SIZES = tuple(1 << power for power in range(10, 24))
QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20)
"""Bytes of the message of one rank."""

REPEATS, WARM_UP = 30, 5

LEAST_SPREAD = 0.05
"""Least relative uncertainty of a measured link: another hour of the same machine."""


def all_reduces(sizes: Sequence[int], ranks: int) -> list[float]:
    """Median seconds of an all-reduce of each size, in bytes of float32, among so many processes."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "seconds"
        spawn(_rank, args=(folder, list(sizes), ranks, str(found)), nprocs=ranks)
        return [float(line) for line in found.read_text().split()]


def _rank(rank: int, folder: str, sizes: list[int], ranks: int, found: str) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    medians = []
    for size in sizes:
        buffer = torch.zeros(max(size // 4, 1))
        times = []
        for _ in range(WARM_UP + REPEATS):
            distributed.barrier()
            begin = time.perf_counter()
            distributed.all_reduce(buffer)
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times[WARM_UP:]))
    if rank == 0:
        Path(found).write_text(" ".join(map(repr, medians)))
    distributed.destroy_process_group()


def rank_counts() -> list[int]:
    """Numbers of processes to measure: 2, and 4 where the machine has as many processors."""
    return [2, 4] if (os.cpu_count() or 1) >= 4 else [2]


def measure_link(journal: Journal, rounds: int, *, quick: bool, advance: Callable[[str], None]) -> LinkFile:
    """The link between processes of this machine, from all-reduces that the journal has or that are made now."""
    sizes, tables = QUICK_SIZES if quick else SIZES, []
    scatter = []
    for ranks in rank_counts():
        times: list[list[float]] = []
        for number in range(rounds):
            key = f"{number} all_reduce ranks={ranks}"
            if key not in journal:
                journal.add(key, seconds=all_reduces(sizes, ranks))
                advance(key)
            times.append(journal[key]["seconds"])
        columns = list(zip(*times, strict=True))
        tables.append(AllReduces(ranks=ranks, bytes=list(sizes), seconds=[min(column) for column in columns]))
        scatter += [math.log(each / min(column)) for column in columns for each in column]
    spread = max(LEAST_SPREAD, math.sqrt(sum(each**2 for each in scatter) / len(scatter)))
    first = tables[0]
    ring, latency = 2 * (first.ranks - 1) / first.ranks, first.seconds[0]
    rest = max(first.seconds[-1] - latency, 1e-9)
    return LinkFile.model_validate({
        "schema": "twin.link/1",
        "name": "gloo",
        "kind": "measured",
        "latency": latency,
        "bandwidth": ring * first.bytes[-1] / rest,
        "all_reduce": [each.model_dump() for each in tables],
        "spread": float(f"{spread:.3g}"),
        "source": f"all-reduces of float32 over gloo among processes on {device_name('cpu')}",
    })  # fmt: skip
