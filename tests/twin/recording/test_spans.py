"""Requests from OpenTelemetry spans. The documents are written after vLLM's attribute names, not recorded from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twin.cli import run
from twin.refinement.question import read_measured_run

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
