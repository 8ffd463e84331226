"""A run folder on a disk that does not take all that is written."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reports import run_directory
from reports.run_directory import open_run, read_run, write_columns
from reports.serving_run import write_trace_events


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond this many bytes fails as it does on a full disk: some of it may have been written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_draft_is_left_and_the_old_file_stays(tmp_path: Path) -> None:
    with open_run(tmp_path, "sweep", "x", {}, resume=False) as run:
        run.write_text("summary.json", "old")
        before = {file.name for file in run.path.iterdir()}
        with files_of_at_most(1000):
            for write in (
                lambda: run.write_text("summary.json", "new" * 1000),
                lambda: write_columns(run.path / "requests.parquet", {"a": os.urandom(5000)}),
                lambda: write_trace_events(run.path / "events.gz", [Log()] * 1000, Requests()),
            ):
                with pytest.raises(OSError, match="File too large") as error:
                    write()
                assert str(run.path) in str(error.value.filename)
        assert {file.name for file in run.path.iterdir()} == before
        assert (run.path / "summary.json").read_text() == "old"


class Log:
    ends = index = starts = prefill_tokens = kinds = changes = outages = ()

    @property
    def name(self) -> str:
        return os.urandom(50).hex()


class Requests:
    id = arrival = first_token = last_token = ()


def test_a_point_that_did_not_fit_leaves_no_half_line(tmp_path: Path) -> None:
    with open_run(tmp_path, "sweep", "x", {}, resume=False) as run:
        run.add_point("0", {"value": 1})
        with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
            run.add_point("1", {"value": "x" * 2000})
        run.add_point("2", {"value": 3})
        assert run.points() == {"0": {"value": 1}, "2": {"value": 3}}


@pytest.mark.parametrize("why", ["OSError: [Errno 28] No space left on device: 'points.jsonl'", "é" * 400])
def test_a_full_disk_still_takes_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def full(file: Path, text: str) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    with open_run(tmp_path, "sweep", "x", {"scenarios": [{"a": [1, 2, 3]}] * 5}, resume=False) as run:
        size = (run.path / "manifest.json").stat().st_size
        monkeypatch.setattr(run_directory, "write_text", full)
        run.abandon(why)
    manifest, _ = read_run(run.path)
    assert manifest["complete"] is False
    assert why.encode("ascii", "replace").decode().startswith(manifest["status"])
    assert len(manifest["status"]) > 50
    assert (run.path / "manifest.json").stat().st_size == size
    assert json.loads((run.path / "manifest.json").read_text())["scenarios"][4] == {"a": [1, 2, 3]}
