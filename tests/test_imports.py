"""Imports: help, plain simulations and the Python surface start quickly, and schedulers stay pure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "pandas", "scipy", "matplotlib", "pyarrow")


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
    assert modules.isdisjoint(f"scenarios.{name}" for name in ("requests", "planning", "memory"))
    assert modules.isdisjoint(("latency_models.deployment", "twin.serving.engine.draft_outcomes"))


def test_the_python_surface_is_imported_when_it_is_used() -> None:
    light = loaded("import twin; dir(twin), twin.__all__, twin.__version__")
    assert light.isdisjoint((*HEAVY, "numpy", "simpy", "pydantic", "yaml", "rich", "cyclopts"))
    used = loaded("import twin; twin.load('examples/sun-shared.yaml')")
    assert used.isdisjoint(("torch", "pandas", "matplotlib"))


def test_schedulers_need_the_standard_library_only() -> None:
    modules = loaded("import schedulers.bundle_slots")
    assert modules.isdisjoint((*HEAVY, "numpy", "simpy", "pydantic", "yaml", "random", "asyncio"))
