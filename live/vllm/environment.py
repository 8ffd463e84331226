"""The environment of a process that runs vLLM. vLLM and PyTorch read it when they are imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread, bound to no core. Without the first two, on a machine that other
programs use, a step of 8 ms takes 470: threads wait for each other at every barrier."""


def prepare_process() -> None:
    """Set what the environment does not set already, for an engine in this process."""
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **VARIABLES}.items():
        os.environ.setdefault(name, value)


def end_with_parent() -> None:
    """Have the calling process get SIGTERM when its parent ends, be it killed; on Linux alone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
