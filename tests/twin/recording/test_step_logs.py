"""From a step log of vLLM to step times: `twin observe --vllm-log`, `twin calibrate steps`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latency_models.sources.engine_regression import read_engine_regression
from live.vllm.step_log import LoggedEngine, ScheduledChunk, ScheduledStep, StepLogWriter
from schedulers.batches import DecodeBatch
from schedulers.sequence import Sequence
from twin.cli import run
from workloads.request import Request


def write_log(file: Path, prompts: bool = True, steps: int = 400) -> None:
    """A log of an engine whose steps take 5 ms, 0.2 ms a decode and 0.1 ms a prompt token."""
    writer = StepLogWriter(file, LoggedEngine("one", "chat", "tiny", "direct", 1, 1000, 32))
    for i in range(steps):
        decodes, tokens = i % 7, (i * 13) % 64 + 1 if prompts and i % 3 == 0 else 0
        if not decodes and not tokens:
            continue
        chunks = [ScheduledChunk("p", tokens, 0, True)] if tokens else []
        step = ScheduledStep(chunks, ["d"] * decodes, decodes, 50 * decodes, 50 if decodes else 0)
        writer.write(step, 0.0, 0.005 + 2e-4 * decodes + 1e-4 * tokens, 0.1)
    writer.close()


def test_a_log_becomes_step_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "log.csv")
    assert run(["observe", "--vllm-log", str(tmp_path / "log.csv"), "-o", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert "prompts beside decodes: 114 steps of up to 68 tokens and 6 decodes" in told
    assert run(["calibrate", "steps", str(tmp_path / "run"), "-o", str(tmp_path / "steps.yaml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["heldout_median_error"] < 0.01
    assert {row["name"] for row in document["unknowns"]} >= {"machine", "rows", "beyond"}
    model = read_engine_regression(tmp_path / "steps.yaml")
    decodes = [Sequence(Request(i, 0.0, 49, 9), i, False) for i in range(4)]
    assert model.seconds(DecodeBatch((), decodes, 200, 50)) == pytest.approx(0.0058, rel=0.02)


def test_what_a_log_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path / "log.csv", prompts=False)
    assert run(["observe", "--vllm-log", str(tmp_path / "log.csv"), "-o", str(tmp_path / "run")]) == 0
    assert "not seen: prompts alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"),
    [("a,b\n1,2\n", "log.csv: batch.decode_kv_tokens: expected a log of live.vllm.schedulers"), ("", "log.csv")],
)
def test_another_file_is_refused(text: str, error: str, tmp_path: Path, refusal) -> None:
    (tmp_path / "log.csv").write_text(text)
    assert error in refusal("observe", "--vllm-log", str(tmp_path / "log.csv"), "-o", str(tmp_path / "run"))


def test_a_run_is_not_overwritten(tmp_path: Path, refusal) -> None:
    write_log(tmp_path / "log.csv")
    command = ["observe", "--vllm-log", str(tmp_path / "log.csv"), "-o", str(tmp_path / "run")]
    assert run(command) == 0
    assert "expected a folder without steps.csv" in refusal(*command)
