"""What a measurement was made on."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import torch

from workloads.errors import BadInput

DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
"""Of weights and what is computed with them, by device, where nobody says otherwise."""


def device_name(device: str) -> str:
    """The product behind "cpu" or "cuda", and for a CPU the threads that were used.

    Raises:
        BadInput: no such device here.
    """
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


def versions() -> dict[str, str]:
    """Of what was installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("triton", "serving-twin"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
