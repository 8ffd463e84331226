"""Limits on the cost of loading, and on the modules that are loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"numpy", "scipy", "pandas", "pyarrow", "matplotlib", "torch", "simpy"}


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in memory after a statement in a fresh interpreter."""
    code = f"{statement}; import sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


@pytest.mark.parametrize(
    ("statement", "tolerance"),
    [
        ("import latency_models", set()),
        (
            "from latency_models import calibration_loader as c; c.load_calibration('deepseek-v3-ascend-910c')",
            set(),
        ),
        ("from latency_models.deployment.roofline import derive", set()),
        (
            "from latency_models.fitting import linear as m; m.LinearLatency.from_coefficients(1, 2).predict([3])",
            {"numpy"},
        ),
    ],
)
def test_loading_is_cheap(statement: str, tolerance: set[str]) -> None:
    loaded = loaded_by(statement)
    assert loaded & HEAVY <= tolerance
    assert not loaded & {"kernels", "twin", "live"}
