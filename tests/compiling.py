"""Python in a process of its own, in which Triton compiles: in this one its interpreter may have taken its place."""

from __future__ import annotations

import os
import subprocess
import sys


def run_compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`, whatever its exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
