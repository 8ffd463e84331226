"""Every kernel that ships compiles for sm_80 and sm_90, spills nothing, and fits.

In a process of its own: where the interpreter was asked for, there is nothing to compile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kernels.ahead_of_time import operations


@pytest.mark.parametrize("operation", operations())
def test_what_ships_fits(operation: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kernels.ahead_of_time", operation, "--json"]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    made = json.loads(told.stdout)
    assert made, "an operation ships at least one configuration"
    assert [each for each in made if not each["fits"]] == []
    assert {each["arch"] for each in made} >= {90}
    assert told.returncode == 0
