"""Every kernel that ships compiles for sm_80 and sm_90, spills nothing, and fits.

In a process of its own: where the interpreter was asked for, there is nothing to compile.
"""

from __future__ import annotations

import json

import pytest

from kernels.ahead_of_time import operations
from tests.compiling import run_compiling


@pytest.mark.parametrize("operation", operations())
def test_what_ships_fits(operation: str) -> None:
    process = run_compiling("-m", "kernels.ahead_of_time", operation, "--json")
    builds = json.loads(process.stdout)
    assert builds, "an operation ships at least one configuration"
    assert [build for build in builds if not build["fits"]] == []
    assert {build["arch"] for build in builds} >= {90}
    assert process.returncode == 0
