"""Memory of the process and of its devices."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

from workloads.errors import BadInput

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""

MEMINFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
"""Files in which Linux reports the machine's memory, and the process's share of it."""


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations; returns whether it accepted the setting.

    A forward pass on the CPU allocates and frees megabytes in each layer. By default glibc returns such memory to the
    kernel, which clears every page again: 10,500 page faults in a decode step of 16 sequences with 1,000 tokens each,
    half of the step's time (53 ms instead of 27 on two virtual cores). The setting holds for the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


def use_huge_pages() -> None:
    """Let PyTorch ask Linux for huge pages for large tensors. Call it before the first tensor is made.

    A step reads all weights, and with pages of 4 KiB it waits for address translation as well: on two virtual cores a
    decode step of 8 sequences with 96 MB of weights took 25.0 ms, and 23.2 ms with huge pages; it also varied less
    while other processes ran. The setting holds for the whole process. One that the environment makes is kept.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def freeze_loaded_objects() -> None:
    """Exclude everything that is loaded now, modules and models, from garbage collection.

    A full collection with PyTorch loaded takes 92 ms, in which no step runs.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from pausing a step."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def available_bytes(device: str) -> int | None:
    """Memory of "cpu" or "cuda" that can still be allocated; None if the system does not report it.

    On a CPU it is Linux's MemAvailable, or less if the process is in a control group with a limit.
    """
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    available = [int(line.split()[1]) * 1024 for line in _lines(MEMINFO) if line.startswith("MemAvailable:")]
    limit = "".join(_lines(CONTROL_GROUP / "memory.max"))
    if limit.isdigit():
        used_bytes = int("".join(_lines(CONTROL_GROUP / "memory.current")) or 0)
        cached = [
            int(line.split()[1]) for line in _lines(CONTROL_GROUP / "memory.stat") if line.startswith("inactive_file ")
        ]
        available.append(max(int(limit) - used_bytes + sum(cached), 0))
    return min(available, default=None)


def check_memory(
    size: int, purpose: str, device: str, *, field: str | None = None, value: object = None, file: Path | None = None
) -> None:
    """Refuse an allocation that does not fit into a device's memory, before it is made.

    Args:
        size: bytes. what: what needs them, in the plural. field, value, file: where the user set it.

    Raises:
        BadInput: more than is available.
    """
    available = available_bytes(device)
    if available is not None and size > available:
        expected = f"expected less: {purpose} take {_gib(size)} of {device} memory, and {_gib(available)} are available"
        raise BadInput(expected, field=field, value=value, file=file)


def _lines(file: Path) -> list[str]:
    """The lines of a system file; none if it does not exist."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _gib(size: int) -> str:
    return f"{min(size, 10**30) / 2**30:,.2f} GiB"
