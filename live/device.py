"""The device, the threads and the software versions that run a model."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

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
