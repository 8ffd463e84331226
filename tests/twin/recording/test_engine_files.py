"""Runs from files of engines: OpenTelemetry spans, written after vLLM's attribute names, and step logs of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from latency_models.sources.engine_regression import read_engine_regression
from live.vllm.step_log import LoggedEngine, ScheduledChunk, ScheduledStep, StepLogWriter
from schedulers.batches import DecodeBatch
from schedulers.sequence import Sequence
from twin.cli import run
from twin.refinement.question import read_measured_run
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


START = 1_700_000_000_000_000_000


def span(i: int, *, name: str = "llm_request", **attributes: float) -> dict[str, Any]:
    """Request i: arrives i seconds after the start, 0.5 s to its first token and 2.5 s to its last."""
    values = {
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.usage.prompt_tokens": 100 + i,
        "gen_ai.usage.completion_tokens": 21,
        **attributes,
    }
    entries: list[dict[str, Any]] = [{"key": "gen_ai.request.id", "value": {"stringValue": f"cmpl-{i}"}}]
    for key, value in values.items():
        typed = {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}
        entries.append({"key": key, "value": typed})
    begin = START + i * 10**9
    return {"name": name, "spanId": f"{i:016x}", "startTimeUnixNano": str(begin), "attributes": entries}


def document(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "vllm"}, "spans": list(spans)}]}]}


QUEUED = {"gen_ai.latency.time_in_queue": 0.1, "gen_ai.latency.time_in_model_prefill": 0.3}


def test_a_file_of_spans_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broken = span(3)
    broken["attributes"] = broken["attributes"][:2]  # aborted: its latencies are missing
    lines = [document(span(1, **QUEUED), span(0, name="tokenize")), document(span(0), broken)]
    Path("spans.json").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert run(["observe", "--spans", "spans.json", "-o", "observed"]) == 0
    measured_run = read_measured_run(Path("observed"))
    assert measured_run.prompts.tolist() == [100, 101]
    # Without queue and prefill a request is queued as it arrives; with them, 0.4 s before its first token.
    assert measured_run.ttft.tolist() == pytest.approx([0.5, 0.4], abs=1e-6)
    assert measured_run.decoding.tolist() == pytest.approx([2.0, 2.0], abs=1e-6)
    assert measured_run.first[1] - measured_run.first[0] == pytest.approx(1.0, abs=1e-6)
    assert not measured_run.by_client
    (skipped,) = Path("observed/skipped.jsonl").read_text().splitlines()
    assert json.loads(skipped)["why"] == "no gen_ai.latency.e2e"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "expected OTLP-JSON"),
        ('{"resourceSpans": []}', "expected spans named llm_request"),
        ('{"resourceSpans": []}\nno', "spans.json:2: expected a JSON document"),
    ],
)
def test_other_files_are_refused_in_one_line(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spans.json").write_text(text)
    assert expected in refusal("observe", "--spans", "spans.json", "-o", "observed")


def test_a_server_or_spans(refusal, tmp_path: Path) -> None:
    assert "either this, or --spans" in refusal("observe", "-o", str(tmp_path / "x"))
