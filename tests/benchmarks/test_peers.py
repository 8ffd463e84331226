"""Peers are timed if they are installed, and else named. Here a stand-in package takes the place of DynoSim."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers

DYNOSIM, VIDUR, _ = peers.PEERS

BUSY = 0.15
"""CPU seconds that the stand-in's simulation takes."""

STAND_IN = f"""
import time
from types import SimpleNamespace


def run_mocker_synthetic_trace_replay(prompt, answer, requests, extra_engine_args, request_rate):
    if requests == 13:
        raise ValueError("thirteen requests")
    assert extra_engine_args["engine"]["max_num_batched_tokens"] == 512
    start = time.process_time()
    while time.process_time() - start < {BUSY}:
        pass
    return SimpleNamespace(summary=dict(
        completed_requests=requests, total_output_tokens=answer * requests, duration_ms=1e3 * requests / request_rate,
        mean_itl_ms=14.0,
    ))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package `dynamo` with the call that the program makes, on the path of processes that are started."""
    (tmp_path / "dynamo").mkdir()
    (tmp_path / "dynamo" / "_core.py").write_text(STAND_IN)
    (tmp_path / "ai_dynamo_runtime-9.9.dist-info").mkdir()
    (tmp_path / "ai_dynamo_runtime-9.9.dist-info" / "METADATA").write_text("Name: ai-dynamo-runtime\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_the_simulation_is_timed_apart_from_its_process() -> None:
    result = peers.run_peer(DYNOSIM, sys.executable, peers.workload(40))
    assert (result["version"], result["requests"], result["simulated_seconds"]) == ("9.9", 40, 8.0)
    assert result["mean_itl"] == pytest.approx(0.014)
    assert BUSY <= result["cpu"] <= result["process_cpu"]
    # CPU seconds and elapsed seconds of one thread come from two clocks: the second may be behind by a tick
    assert result["cpu"] - 0.02 <= result["seconds"] <= result["process"]


def test_an_absent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", (DYNOSIM,))
    interpreters, missing = peers.find([sys.executable, "/no/such/python"])
    assert interpreters == {}
    assert missing == [{"peer": "DynoSim", "reason": "absent: ModuleNotFoundError: No module named 'dynamo'"}]


@pytest.mark.usefixtures("installed")
def test_a_failing_peer_is_named_with_its_error() -> None:
    assert peers.run_peer(DYNOSIM, sys.executable, peers.workload(13)) == {"error": "ValueError: thirteen requests"}


@pytest.mark.usefixtures("installed")
def test_the_first_interpreter_that_has_a_peer_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", (DYNOSIM, VIDUR))
    interpreters, missing = peers.find(["/no/such/python", sys.executable])
    assert interpreters == {DYNOSIM: sys.executable}
    assert [peer["peer"] for peer in missing] == ["Vidur"]


def test_a_ratio_is_the_median_of_the_turns() -> None:
    ours: list[dict[str, Any]] = [{"seconds": 1.0}, {"seconds": 9.0}, {"seconds": 2.0}]
    peer_runs: list[dict[str, Any]] = [{"seconds": 2.0}, {"seconds": 10.0}, {"seconds": 8.0}]
    assert peers.ratio(ours, "seconds", peer_runs, "seconds") == 0.5  # of 0.5, 0.9 and 0.25
