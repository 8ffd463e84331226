"""Communication among processes of this machine: round trips of activations in an AFD bundle, and all-reduces.

All-reduces over gloo become a link file that a scenario's `communication` can name.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from latency_models.sources.kernel_tables.settings import AllReduces, LinkFile
from live.calibration.plan import Journal
from live.device import device_name
from live.topologies.sockets import Connection

REPEATS, WARM_UP = 30, 5

SIZES = tuple(1 << power for power in range(10, 24))
QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20)
"""Bytes of the message of one rank."""

MIN_SPREAD = 0.05
"""Least relative uncertainty of a measured link: another hour of the same machine."""

LIMIT = 60.0
"""Seconds that a message may take."""


def round_trips(requests: Sequence[int], bytes_each: int) -> list[float]:
    """Median seconds of a message and an equally long reply, by number of requests, over loopback connections."""
    sizes = [count * bytes_each for count in requests]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("spawn").Process(target=_reply, args=(listener.getsockname()[1], sizes))
        process.start()
        listener.settimeout(LIMIT)
        accepted, _ = listener.accept()
    connection = Connection(accepted, LIMIT)
    try:
        return [_round_trip(connection, size) for size in sizes]
    finally:
        connection.close()
        process.join()


def _round_trip(connection: Connection, size: int) -> float:
    buffer, times = memoryview(bytearray(size)), []
    for _ in range(WARM_UP + REPEATS):
        begin = time.perf_counter()
        connection.send(buffer)
        connection.receive(buffer)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


def _reply(port: int, sizes: Sequence[int]) -> None:
    connection = Connection(socket.create_connection(("127.0.0.1", port), LIMIT), LIMIT)
    for size in sizes:
        buffer = memoryview(bytearray(size))
        for _ in range(WARM_UP + REPEATS):
            connection.receive(buffer)
            connection.send(buffer)
    connection.flush()
    connection.close()


def all_reduces(sizes: Sequence[int], ranks: int) -> list[float]:
    """Median seconds of an all-reduce of each size, in bytes of float32, among `ranks` processes."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds"
        spawn(_rank, args=(folder, list(sizes), ranks, str(result)), nprocs=ranks)
        return [float(line) for line in result.read_text().split()]


def _rank(rank: int, folder: str, sizes: list[int], ranks: int, result: str) -> None:
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
        Path(result).write_text(" ".join(map(repr, medians)))
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
        scatter += [math.log(seconds / min(column)) for column in columns for seconds in column]
    spread = max(MIN_SPREAD, math.sqrt(sum(deviation**2 for deviation in scatter) / len(scatter)))
    first = tables[0]
    ring, latency = 2 * (first.ranks - 1) / first.ranks, first.seconds[0]
    transfer = max(first.seconds[-1] - latency, 1e-9)
    return LinkFile.model_validate({
        "schema": "twin.link/1",
        "name": "gloo",
        "kind": "measured",
        "latency": latency,
        "bandwidth": ring * first.bytes[-1] / transfer,
        "all_reduce": [table.model_dump() for table in tables],
        "spread": float(f"{spread:.3g}"),
        "source": f"all-reduces of float32 over gloo among processes on {device_name('cpu')}",
    })  # fmt: skip
