"""Threads for the text and JSON of large requests, which would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE = 16 << 10
"""Bytes of a body from which its work is done in a thread: below, it takes less than a few milliseconds."""

THREADS = 2
"""A second one, so that one very long text does not hold up all other large requests."""


class Offload:
    """Runs work on the event loop if it is small, else in one of a few threads.

    What runs in a thread may read the service and raise its errors, but must not change what the event loop uses.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="live.server")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`.

        Args:
            size: bytes of the request that it works on.
        """
        if size < LARGE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
