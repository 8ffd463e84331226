"""The published kernel tables and measured points, where they are present."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.latency_models.sources.conftest import present


@pytest.fixture(scope="session")
def real_tables() -> Path:
    return present("kernel_tables/aiconfigurator")


@pytest.fixture(scope="session")
def real_rows() -> Path:
    return present("measured/aiconfigurator_silicon_calib_dev.csv.gz")
