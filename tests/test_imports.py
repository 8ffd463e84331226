"""Imports: quick help, folders that stay light, and no cast of a value into a class that it is not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "pandas", "scipy", "matplotlib", "pyarrow")

SECTIONS = (
    "admission_control", "arrival_rates", "autoscaling", "chunking", "kv_memory", "kv_offloading", "many_models",
    "model_slots", "pipeline", "planning", "prefixes", "sessions", "speculation", "tasks", "trace",
)  # fmt: skip
"""Modules of `scenarios` for sections that few scenarios have."""


SERVING = """
schema: twin.scenario/1
kind: serving
name: small
workload:
  requests: 5
  prefill: {distribution: fixed, mean: 64}
  decode: {distribution: fixed, mean: 8}
  arrivals: {process: poisson, rate: 5.0}
engine: {num_gpu_blocks: 1000}
step_time: {source: linear, overhead: 0.01, per_token: 1.0e-5}
detail: false
"""


def loaded(code: str) -> set[str]:
    """Modules that a fresh interpreter holds after `code`."""
    probe = f"{code}\nimport sys; print(); print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(process.stdout.splitlines()[-1].split())


def test_help_is_light() -> None:
    modules = loaded("from twin.cli import run; run(['--help'])")
    assert modules.isdisjoint((*HEAVY, "numpy", "simpy", "pydantic", "yaml", "rich", "cyclopts"))


def test_a_simulation_without_detail_is_light(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(SERVING)
    line = ["simulate", str(file), "--json", "--no-figures", "--runs", str(tmp_path / "runs")]
    modules = loaded(f"from twin.cli import run; assert run({line!r}) == 0")
    assert "numpy" in modules
    assert modules.isdisjoint((*HEAVY, "rich", "numpy.ma", "difflib", "html", "multiprocessing", "asyncio"))
    assert modules.isdisjoint(f"scenarios.{section}" for section in SECTIONS)
    assert "twin.serving.engine.draft_outcomes" not in modules


def test_a_section_is_imported_when_a_scenario_has_it(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(SERVING.replace("engine: {", "engine: {chunking: {policy: static, tokens: 64}, "))
    modules = loaded(f"import twin; twin.simulate({str(file)!r})")
    assert "scenarios.steps" in modules
    assert modules.isdisjoint(f"scenarios.{section}" for section in SECTIONS if section != "chunking")


def test_the_python_surface_is_imported_when_it_is_used() -> None:
    light = loaded("import twin; dir(twin), twin.__all__, twin.__version__")
    assert light.isdisjoint((*HEAVY, "numpy", "simpy", "pydantic", "yaml", "rich", "cyclopts"))
    used = loaded("import twin; twin.load('examples/sun-shared.yaml')")
    assert used.isdisjoint(("torch", "pandas", "matplotlib"))


def test_schedulers_need_the_standard_library_only() -> None:
    modules = loaded("import schedulers.bundle_slots")
    assert modules.isdisjoint((*HEAVY, "numpy", "simpy", "pydantic", "yaml", "random", "asyncio"))


@pytest.mark.parametrize("package", ["kernels", "live", "reports", "scenarios", "schedulers", "twin", "workloads"])
def test_packages_say_what_may_live_in_them(package: str) -> None:
    modules = loaded(f"import {package}; assert len({package}.__doc__) > 100")
    assert modules.isdisjoint(HEAVY)


PACKAGES = ("workloads", "schedulers", "latency_models", "scenarios", "twin", "live", "reports")


def _casts_of_none(source: str) -> list[int]:
    """Lines with a `cast(…, None)`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "cast"
        and isinstance(call.args[1], ast.Constant)
        and call.args[1].value is None
    ]


def test_nothing_casts_none() -> None:
    # Compiled classes check their arguments when they are called, mypy sees no cast's value.
    assert _casts_of_none("x = cast(Any, None)") == [1]
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert [str(file) for file in files if "cast(" in (text := file.read_text()) and _casts_of_none(text)] == []
