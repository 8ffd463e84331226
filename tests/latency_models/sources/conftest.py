"""The small tables in folders of their own, and the published ones where they are present."""

from __future__ import annotations

from pathlib import Path

import pytest

from latency_models.sources.kernel_tables.files import read_kernel_tables
from latency_models.sources.kernel_tables.tables import KernelTables
from tests.latency_models.sources.aiconfigurator import small_tables as aiconfigurator
from tests.latency_models.sources.kernel_tables import small_tables as profiler

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def present(name: str) -> Path:
    """A path below the shared data; the test is skipped where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    return path


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder of aiconfigurator's small tables."""
    return aiconfigurator.make_tables(tmp_path / "lab_engine_1.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a profiler's small tables."""
    return profiler.make_tables(tmp_path / "kernels_tp1")


@pytest.fixture(scope="session")
def aiconfigurator_tables() -> Path:
    return present("kernel_tables/aiconfigurator")


@pytest.fixture(scope="session")
def real_folder() -> Path:
    return present("measured/vllm_0.19_rtxpro6000_llama31_8b/kernels_tp1")


@pytest.fixture(scope="session")
def real_tables(real_folder: Path) -> KernelTables:
    return read_kernel_tables(real_folder, describe=True)
