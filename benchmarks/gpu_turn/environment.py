"""Versions, the device's properties, its clock idle and warm, and ceilings on random values.

python -m benchmarks.gpu_turn.environment --device cuda --out FILE
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import torch

from benchmarks.gpu_turn.stages import stage_parser
from benchmarks.kernels import Bench, about
from kernels.microbenchmark import gpu_clock


def gpu_properties() -> dict[str, Any]:
    """Properties of the GPU, from PyTorch and nvidia-smi."""
    properties = torch.cuda.get_device_properties(0)
    names = ("name", "multi_processor_count", "total_memory", "L2_cache_size", "major", "minor")
    document: dict[str, Any] = {name: getattr(properties, name, None) for name in names}
    document["free_memory"] = torch.cuda.mem_get_info()[0]
    if shutil.which("nvidia-smi"):
        document["nvidia_smi"] = subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER"], capture_output=True,
                                                text=True, check=False).stdout  # fmt: skip
    return document


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    options = stage_parser(__doc__).parse_args(arguments)
    on_gpu = options.device == "cuda"
    clock_idle = gpu_clock() if on_gpu else None
    bench = Bench(options.device)
    document = about(bench, "twin.gpu-environment/1") | {"clock_idle": clock_idle}
    document["clock_warm"] = gpu_clock() if on_gpu else None
    if on_gpu:
        document["gpu"] = gpu_properties()
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    ceilings = bench.ceilings
    print(f"copy {ceilings['copy'] / 1e12:.3f} TB/s, product {ceilings['matmul'] / 1e12:.1f} TFLOP/s")
    print(f"an empty kernel {ceilings['launch'] * 1e6:.2f} µs; clock {clock_idle} to {document['clock_warm']} MHz")
    return 0


if __name__ == "__main__":
    sys.exit(main())
