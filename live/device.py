"""The device, the memory, the threads and the software versions that run a model."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from workloads.errors import BadInput

DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
"""Type of weights and activations by device, unless the user chooses another."""


def device_name(device: str) -> str:
    """The product name of "cpu" (with its threads) or "cuda"; `BadInput` if it does not exist here."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise BadInput("expected a CUDA device, found none", field="device", value=device)
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{model}, {torch.get_num_threads()} threads"


def use_threads(threads: int, field: str = "threads") -> None:
    """Use this many CPU threads for one operation.

    `BadInput` for none, or more than processors: threads would wait for one another, or OpenMP end the process.
    """
    limit = os.cpu_count() or 1
    if not 1 <= threads <= limit:
        raise BadInput(f"expected 1 to {limit}, the processors of this machine", field=field, value=threads)
    torch.set_num_threads(threads)


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that run a model."""
    result = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("triton", "serving-twin"):
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        result["cuda"] = torch.version.cuda
    return result


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Constants of glibc's malloc.h."""

MEMINFO, CONTROL_GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
"""Files in which Linux reports the machine's memory, and the process's share of it."""


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for later allocations; returns whether it accepted the setting.

    By default glibc returns the megabytes of each layer to the kernel, which clears every page again: half of a decode
    step's time (53 ms instead of 27 for 16 sequences with 1,000 tokens each, on two virtual cores).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, 1 << 30)) and bool(mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1))


def use_huge_pages() -> None:
    """Let PyTorch ask Linux for huge pages for large tensors, unless the environment says otherwise; call it first.

    A step reads all weights: on two virtual cores a decode step of 8 sequences with 96 MB of weights took 25.0 ms, and
    23.2 ms with huge pages; it also varied less.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def freeze_loaded_objects() -> None:
    """Exclude all that is loaded now from garbage collection: a full one takes 92 ms, in which no step runs."""
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
    """Bytes of "cpu" (MemAvailable, or a control group's) or "cuda" that can be allocated; None: not known."""
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
    """Refuse, by a `BadInput` about `field`, an allocation that does not fit into a device's memory."""
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


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device, made without waiting for its current work."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class PendingHostCopy:
    """A copy of a tensor's present values to the host, whatever later work on the same stream writes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def numpy(self) -> npt.NDArray[Any]:
        """The values; waits until they have been copied."""
        if self._copied is not None:
            self._copied.synchronize()
        values: npt.NDArray[Any] = self._host.numpy()
        return values
