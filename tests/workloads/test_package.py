from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import workloads

ROOT = Path(__file__).resolve().parents[2]


def loaded_after(statement: str) -> set[str]:
    """The top-level packages in memory after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_request_alone_needs_no_third_party_package() -> None:
    loaded = loaded_after("import workloads\nfrom workloads.request import Request")
    assert "workloads" in loaded
    assert not loaded & {"numpy", "scipy", "pandas", "pyarrow"}


def test_everything_together_needs_numpy_only() -> None:
    loaded = loaded_after("from workloads import *")
    assert "numpy" in loaded
    assert not loaded & {"scipy", "pandas", "pyarrow", "pydantic", "yaml", "simpy", "matplotlib"}
    assert not loaded & {"schedulers", "latency_models", "kernels", "twin", "live", "reports"}


def test_the_public_names_are_these() -> None:
    names = (
        "TASKS Arrivals BadInput ClosedLoop Deterministic Empirical Fixed Gamma Geometric Independent JointEmpirical "
        "LengthPairs Lengths LogNormal ModelMix Poisson Replay Request SharedPrefixes TaskMix TaskShare Trace "
        "TraceFormat TwinError Uniform Workload read_trace"
    )
    assert " ".join(workloads.__all__) == names


@pytest.mark.parametrize("name", workloads.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(workloads, name) is not None
    assert getattr(workloads, name) is getattr(workloads, name)


def test_any_other_name_is_not() -> None:
    with pytest.raises(AttributeError, match="module 'workloads' has no attribute 'np'"):
        _ = workloads.np
    with pytest.raises(ImportError):
        from workloads import Poison  # noqa: F401


def test_the_examples_of_the_trace_reference_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(ROOT / "docs" / "reference" / "traces.md"), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0
