"""The small tables in a folder of their own, and the real ones where they are present."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.latency_models.sources.aiconfigurator.small_tables import make_tables

SHARED = Path(__file__).resolve().parents[5] / "shared" / "data"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder of small tables."""
    return make_tables(tmp_path / "lab_engine_1.0")


@pytest.fixture(scope="session")
def real_tables() -> Path:
    """The published tables; the test is skipped where they are absent."""
    folder = SHARED / "kernel_tables" / "aiconfigurator"
    if not folder.exists():
        pytest.skip("the kernel tables are not here")
    return folder


@pytest.fixture(scope="session")
def real_rows() -> Path:
    """The measured points; the test is skipped where they are absent."""
    path = SHARED / "measured" / "aiconfigurator_silicon_calib_dev.csv.gz"
    if not path.exists():
        pytest.skip("the measured points are not here")
    return path
