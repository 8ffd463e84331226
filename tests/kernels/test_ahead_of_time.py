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
    told = run_compiling("-m", "kernels.ahead_of_time", operation, "--json")
    made = json.loads(told.stdout)
    assert made, "an operation ships at least one configuration"
    assert [each for each in made if not each["fits"]] == []
    assert {each["arch"] for each in made} >= {90}
    assert told.returncode == 0
