"""The published kernel tables and measured points, where they are present."""

from __future__ import annotations

from tests.latency_models.sources.aiconfigurator.conftest import real_rows, real_tables

__all__ = ["real_rows", "real_tables"]
