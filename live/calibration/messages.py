"""Round trips of activations between two processes over gloo: the communication of an AFD bundle."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

REPEATS = 30
WARM_UP = 5


def round_trips(requests: Sequence[int], bytes_each: int) -> list[float]:
    """Median seconds of a message and an equally long reply, for each number of requests."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "seconds"
        sizes = [count * bytes_each for count in requests]
        spawn(_rank, args=(folder, sizes, str(found)), nprocs=2)
        return [float(line) for line in found.read_text().split()]


def _rank(rank: int, folder: str, sizes: list[int], found: str) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    medians = []
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8)
        times = []
        for _ in range(WARM_UP + REPEATS):
            begin = time.perf_counter()
            if rank == 0:
                distributed.send(buffer, 1)
                distributed.recv(buffer, 1)
            else:
                distributed.recv(buffer, 0)
                distributed.send(buffer, 0)
            times.append(time.perf_counter() - begin)
        medians.append(statistics.median(times[WARM_UP:]))
    if rank == 0:
        Path(found).write_text(" ".join(map(repr, medians)))
    distributed.destroy_process_group()
