"""Compiles the launches that a rehearsal has recorded into Triton's cache, in many processes, with a GPU or without.

    python -m tests.rehearsal --record LAUNCHES            on any machine
    python -m benchmarks.gpu_turn.precompile LAUNCHES [--processes 16] --out FILE

The folder is $TRITON_CACHE_DIR. A machine with the same Triton and compute capability 9.0 finds what was compiled
elsewhere, so that it can come along. Exit code 4 if a launch does not compile; 0 if there is no file of launches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from kernels.ahead_of_time import FAILED

ALIGNED, UNALIGNED = 32, 33
"""Values of whole numbers: code depends on whether they are multiples of 16, and fit into 32 bits."""


class UnalignedTensor(MockTensor):  # type: ignore[misc]
    """A tensor that begins 8 bytes behind a multiple of 16."""

    @staticmethod
    def data_ptr() -> int:
        return 8


class NoGPU:
    """In place of Triton's driver: a device of compute capability 9.0 that launches nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def arguments(launch: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name for which Triton makes the code of a recorded launch."""
    values: dict[str, Any] = {}
    for name, kind in launch["types"].items():
        aligned = name in launch["aligned"]
        if kind == "constexpr":
            value = launch["constants"][name]
            values[name] = getattr(tl, value["dtype"]) if isinstance(value, dict) else value
        elif kind.startswith("*"):
            values[name] = (MockTensor if aligned else UnalignedTensor)(getattr(torch, launch["tensors"][name]))
        elif kind == "fp32":
            values[name] = 0.5
        else:
            values[name] = (ALIGNED if aligned else UNALIGNED) + (1 << 32 if kind == "i64" else 0)
    return values


def compile_launch(launch: dict[str, Any]) -> dict[str, Any]:
    """Compile one launch: its kernel, seconds, and why it did not compile."""
    begin, error = time.perf_counter(), ""
    if not torch.cuda.is_available():
        driver.set_active(NoGPU())
    try:
        kernel = getattr(importlib.import_module(launch["module"]), launch["kernel"])
        kernel.run(**arguments(launch), **launch["options"], grid=(1,), warmup=True)
    except Exception as failure:  # whatever the compiler raises
        error = f"{type(failure).__name__}: {failure}"[:300]
    return {"kernel": launch["kernel"], "seconds": time.perf_counter() - begin, "error": error}


def main(arguments: list[str] | None = None) -> int:
    """The command's entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launches", type=Path, metavar="LAUNCHES")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not options.launches.exists():
        print(f"no {options.launches}: kernels are compiled as they are met")
        return 0
    launches = [json.loads(line) for line in options.launches.read_text(encoding="utf-8").splitlines()]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        rows = pool.map(compile_launch, launches, chunksize=1)
    document = {"schema": "twin.gpu-precompile/2", "launches": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    failures = [row for row in rows if row["error"]]
    print(f"{len(rows)} launches in {sum(row['seconds'] for row in rows):.0f} s, {len(failures)} that do not compile")
    for row in failures:
        print(f"{row['kernel']}: {row['error']}")
    return FAILED if failures else 0


if __name__ == "__main__":
    sys.exit(main())
