"""Stretches that a killed validation keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from twin.afd.role_times import TimedStretch
from twin.validation.backend import read_stretches, write_stretches
from workloads.errors import BadInput


def test_stretches_come_back_as_they_were(tmp_path: Path) -> None:
    stretches = [TimedStretch(1, "attention.stage", (8.0, 640.0), 1e-3), TimedStretch(2, "ffn.wait", (), 2e-6)]
    write_stretches(tmp_path, stretches)
    assert read_stretches(tmp_path) == stretches


def test_stretches_of_another_version_are_refused(tmp_path: Path) -> None:
    write_stretches(tmp_path, [TimedStretch(1, "attention.stage", (8.0, 500.0, 640.0), 1e-3)])
    with pytest.raises(
        BadInput, match=r"attention\.stage: got \[8\.0, 500\.0, 640\.0\], expected the features of this"
    ):
        read_stretches(tmp_path)
