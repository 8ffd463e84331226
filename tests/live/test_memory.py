"""Memory that the process keeps."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from live import device
from live.device import available_bytes, check_memory, freeze_loaded_objects, use_threads
from workloads.errors import BadInput


def test_what_is_loaded_is_no_longer_walked_and_later_garbage_still_is() -> None:
    """The collector sees next to nothing of what was there, and still finds a cycle that comes after."""

    class Cyclic:
        """Refers to itself; says when it goes."""

        gone = False

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            Cyclic.gone = True

    before = len(gc.get_objects())
    try:
        freeze_loaded_objects()
        assert len(gc.get_objects()) < before / 100
        Cyclic()
        gc.collect()
        assert Cyclic.gone
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"meminfo": "MemTotal: 900 kB\nMemAvailable:     700 kB\n"}, 700 * 1024),
        ({"meminfo": "MemAvailable: 700 kB\n", "memory.max": "max\n"}, 700 * 1024),
        ({"memory.max": "5000\n", "memory.current": "4000\n", "memory.stat": "anon 9\ninactive_file 300\n"}, 1300),
        ({"meminfo": "MemAvailable: 1 kB\n", "memory.max": "5000\n", "memory.current": "10\n"}, 1024),
        ({"memory.max": "5000\n", "memory.current": "6000\n"}, 0),
    ],
    ids=["no Linux", "a machine", "a group without a limit", "a group", "a group with more than there is", "none left"],
)
def test_available_memory(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(device, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device, "CONTROL_GROUP", tmp_path)
    assert available_bytes("cpu") == expected
    if expected is None:
        check_memory(10**400, "things", "cpu")
        return
    check_memory(expected, "things", "cpu")
    with pytest.raises(
        BadInput, match=r"--size: got 3, expected less: things take .* GiB of cpu memory, and 0\.00 GiB"
    ):
        check_memory(expected + 1, "things", "cpu", field="--size", value=3)


def test_threads_are_no_more_than_processors() -> None:
    limit = os.cpu_count() or 1
    before = torch.get_num_threads()
    try:
        use_threads(limit)
        assert torch.get_num_threads() == limit
        for wrong in (0, -1, limit + 1, 100_000, 10**30):
            with pytest.raises(BadInput, match=rf"threads: got {wrong}, expected 1 to {limit}, the processors"):
                use_threads(wrong)
        assert torch.get_num_threads() == limit
    finally:
        torch.set_num_threads(before)
