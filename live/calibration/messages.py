"""Round trips of activations between two processes: the communication of an AFD bundle."""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Sequence

from live.topologies.sockets import Connection

REPEATS = 30
WARM_UP = 5

LIMIT = 60.0
"""Seconds that a message may take."""


def round_trips(requests: Sequence[int], bytes_each: int) -> list[float]:
    """Median seconds of a message and an equally long reply, for each number of requests.

    Messages pass over the connections of `twin serve-live`, on the loopback interface.
    """
    sizes = [count * bytes_each for count in requests]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = multiprocessing.get_context("spawn").Process(target=_reply, args=(listener.getsockname()[1], sizes))
        other.start()
        listener.settimeout(LIMIT)
        called, _ = listener.accept()
    connection = Connection(called, LIMIT)
    try:
        return [_round_trip(connection, size) for size in sizes]
    finally:
        connection.close()
        other.join()


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
