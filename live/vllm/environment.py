"""The environment of a process that runs vLLM's engine itself. vLLM and PyTorch read it when they are imported."""

from __future__ import annotations

import os

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The engine in this process, on one thread, bound to no core. Without the second and third, on a machine that other
programs use, a step of 8 ms takes 470: threads wait for each other at every barrier."""


def prepare_process() -> None:
    """Set what the environment does not set already."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
