"""What loads when: quick help, and folders that stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "pandas", "scipy", "matplotlib", "pyarrow")


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `code`."""
    probe = f"{code}\nimport sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(told.stdout.splitlines()[-1].split())


def test_help_is_light() -> None:
    modules = loaded("from twin.cli import run; run(['--help'])")
    assert modules.isdisjoint((*HEAVY, "numpy", "simpy"))


def test_schedulers_need_the_standard_library_only() -> None:
    modules = loaded("import schedulers.bundle_slots")
    assert modules.isdisjoint((*HEAVY, "numpy", "simpy", "pydantic", "yaml", "random", "asyncio"))


@pytest.mark.parametrize("package", ["kernels", "live", "reports", "schedulers", "twin", "workloads"])
def test_packages_say_what_may_live_in_them(package: str) -> None:
    said = loaded(f"import {package}; assert len({package}.__doc__) > 100")
    assert said.isdisjoint(HEAVY)
