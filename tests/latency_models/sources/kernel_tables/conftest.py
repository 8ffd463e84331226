"""The small tables in a folder of their own, and the real ones where they are present."""

from __future__ import annotations

from pathlib import Path

import pytest

from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.sources.kernel_tables.tables import KernelTables
from tests.latency_models.sources.kernel_tables.small_tables import make_tables

SHARED = Path(__file__).resolve().parents[5] / "shared" / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of small tables."""
    return make_tables(tmp_path / "kernels_tp1")


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The published tables; the test is skipped where they are absent."""
    folder = SHARED / "measured" / "vllm_0.19_rtxpro6000_llama31_8b" / "kernels_tp1"
    if not folder.exists():
        pytest.skip("the kernel tables are not here")
    return folder


@pytest.fixture(scope="session")
def real_tables(real_folder: Path) -> KernelTables:
    """The published tables, read."""
    return read_kernel_tables(real_folder, describe=True)
