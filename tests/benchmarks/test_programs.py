"""Theory against simulation in short, and stages of a turn on a GPU: processes with limits that leave few files."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.afd_accuracy import compare
from benchmarks.gpu_turn.runner import Turn
from benchmarks.gpu_turn.stages import Stage

MAX_FILES = 8
ABOUT = {"commit": "c", "device": "d", "versions": {}}


def stage(name: str, program: str, seconds: int = 30) -> Stage:
    return Stage(name, seconds, (), ("-c", program, "{document}"))


def turn(folder: Path, seconds: float = 60.0, **about: Any) -> Turn:
    return Turn(folder / "out", folder / "state", ABOUT | about, time.monotonic() + seconds, tiny=True)


WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'answer': 42})); print('written')"


def test_a_stage_leaves_its_document_and_its_last_lines(tmp_path: Path) -> None:
    rows = turn(tmp_path).run([stage("writes", WRITES), stage("fails", "raise SystemExit(1)")])
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert rows[0]["document"] == {"answer": 42}
    assert rows[0]["last_lines"] == ["written"]
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert results == rows
    assert "| fails | failed | 1 |" in (tmp_path / "out" / "summary.md").read_text()
    assert len(list((tmp_path / "out").iterdir())) <= MAX_FILES


def test_a_stage_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    """The child would write a file two seconds later."""
    late = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(late)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', {child!r}])"
    begin = time.monotonic()
    rows = turn(tmp_path).run([stage("hangs", program, seconds=1), stage("next", "print(1)")])
    assert [row["status"] for row in rows] == ["out of time", "done"]
    time.sleep(max(begin + 3.5 - time.monotonic(), 0))
    assert not late.exists()


@pytest.mark.slow
def test_a_turn_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    from benchmarks.gpu_turn.__main__ import main

    places = ["--out", str(tmp_path / "out"), "--state", str(tmp_path / "state")]
    assert main(["--device", "cpu", "--tiny", *places]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows} == {"done", "needs a GPU"}
    assert len([row for row in rows if row["status"] == "done"]) >= 7


@pytest.mark.parametrize(("advance", "best"), [("lockstep", 8.90), ("independent", 8.31)])
def test_a_short_comparison(advance: str, best: float) -> None:
    result = compare({}, "1", 1000, advance)
    assert result["points"] == 1
    assert abs(result["largest"]) < 0.02
    assert result["r_star_barrier"] == pytest.approx(best, abs=0.02)
