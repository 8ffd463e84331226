"""`twin adapt serve`: modules behind the HTTP server answer as the training code does, mixed in one decode step."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="trainings need the extra [live]")

from live.adaptation import tasks
from live.adaptation.served import ServedModules, _ask, _server
from live.adaptation.text_lessons import Pair
from live.adaptation.training import TrainingSettings
from tests.live.adaptation.typed import smallest
from twin.cli import run
from workloads.errors import TwinError

TASKS = ("reverse_add_one", "sort_add_three", "running_sum")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """A base model in the current folder, and a module for each task, all barely trained: their answers differ."""
    settings = TrainingSettings(steps=20, batch_size=8, learning_rate=3e-3)
    monkeypatch.setitem(tasks.SIZES, "reduced", smallest(settings, prompts=8))
    monkeypatch.chdir(tmp_path)
    assert run(["adapt", "base", "base"]) == 0
    for task in TASKS:
        assert run(["adapt", "prefill", "base", task, "--task", task]) == 0
    capsys.readouterr()
    return [word for task in TASKS for word in ("--module", f"{task}={task}")]


@pytest.mark.slow  # nine seconds; modules for texts of one's own are served in text/test_pairs.py
def test_served_answers_are_those_of_the_training_code(modules: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adapt", "serve", "base", *modules, "--bits", "4", "--prompts", "12", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["tasks"]) == set(TASKS)
    for row in document["tasks"].values():
        assert row["equal_answers"] == 1
        assert row["exact_match_served"] == row["exact_match_offline"]
    steps = document["decode_steps_by_models"]
    assert len(steps) == 3
    assert steps[2] > 0  # steps with sequences of all three models
    assert 0 < document["tpot_mean"] < document["ttft_mean"] + document["tpot_mean"]
    assert run(["adapt", "serve", "base", *modules, "--isolated", "--prompts", "4"]) == 0
    output = capsys.readouterr().out
    assert output.count("100.0 %") >= 3
    assert "isolated decoding: 3 decode modules" in output
    assert "tasks in a decode step: 1.0 on average, 1 at most" in output


def test_a_server_that_ends_is_said_in_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(TwinError, match="the server has not answered: ConnectionRefusedError"):
        _ask(port, "model-0", Pair([1, 2], [3, 4]))


CHATTY = """\
import signal, sys, time
signal.alarm(20)
sys.stderr.write("a warning of the library\\n" * 20_000)
print("http://127.0.0.1:8123 serves", flush=True)
time.sleep(60)
"""


def test_a_server_that_logs_more_than_a_pipe_holds_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chatty = tmp_path / "python"
    chatty.write_text(f"#!{sys.executable}\n{CHATTY}")
    chatty.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(chatty))
    with _server(ServedModules(tmp_path, {}), {}) as port:
        assert port == 8123


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--module", "copy"], "--module: got 'copy', expected TASK=DIRECTORY, each task once"),
        (["--module", "copy=a", "--module", "copy=b"], "--module: got 'copy=b', expected TASK=DIRECTORY"),
        (["--module", "copy=a"], "--module: got 1, expected two modules or more"),
        (["--module", "copy=a", "--isolated", "--bits", "4"], "--bits: got 4, expected none beside --isolated"),
        (["--module", "copy=a", "--prompts", "0"], "--prompts: got 0"),
    ],
)
def test_what_cannot_be_served(flags: list[str], message: str, refusal) -> None:
    assert message in refusal("adapt", "serve", "base", *flags)
