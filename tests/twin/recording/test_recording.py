"""`twin observe` and `twin replay` against a small server, and runs from logs of steps and spans."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latency_models.sources.engine_regression import read_engine_regression
from live.vllm.step_log import LoggedEngine, ScheduledChunk, ScheduledStep, StepLogWriter
from schedulers.batches import DecodeBatch
from schedulers.sequence import Sequence
from tests.twin.recording.server import METRICS, answering, serving
from twin import cli
from twin.recording.run_writer import CompletionStream, RunWriter
from twin.recording.server_pages import Upstream, cache_settings
from twin.recording.traffic import Proxy, prompts
from twin.refinement.question import read_measured_run
from workloads.request import Request
from workloads.trace import IdLists, Trace


@contextlib.contextmanager
def observing(upstream: int, folder: Path, **options: Any) -> Iterator[int]:
    """The proxy in front of a port."""
    writer = RunWriter(folder, {"source": "test"})
    proxy = Proxy(("127.0.0.1", 0), Upstream.of(f"127.0.0.1:{upstream}", "--upstream"), writer, **options)
    try:
        with serving(proxy) as port:
            yield port
    finally:
        writer.close()


def post(port: int, path: str, **fields: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    connection.request("POST", path, json.dumps(fields).encode(), headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_proxy_passes_all_and_records_streams(tmp_path: Path) -> None:
    with answering() as (behind, bodies_seen), observing(behind, tmp_path / "run") as port:
        request = {"prompt": "private words", "max_tokens": 5, "stream": True}
        direct, passed = (post(port_, "/v1/completions", **request) for port_ in (behind, port))
        assert direct == passed  # the count that the proxy requests is left out again
        chat = post(port, "/v1/chat/completions", messages=[], max_tokens=3, stream=True)
        assert chat[0] == 200
        counted = post(port, "/v1/completions", **request, stream_options={"include_usage": True})
        assert b'"usage"' in counted[1]
        assert post(port, "/v1/completions", prompt="x", max_tokens=2) == (200, b'{"choices": [{"text": "whole"}]}')
        assert post(port, "/v1/completions", prompt="refuse", max_tokens=2, stream=True)[0] == 400
        assert post(port, "/v1/embeddings", input="x")[0] == 200
    rows = lines(tmp_path / "run" / "requests.jsonl")
    assert [(row["input_toks"], row["output_toks"]) for row in rows] == [(13, 5), (4, 3), (13, 5)]
    for row in rows:
        assert row["queued_ts"] + 0.02 <= row["first_token_ts"] <= row["last_token_ts"]
        assert row["queued_ts"] + 0.02 + 0.004 * (row["output_toks"] - 1) <= row["last_token_ts"]
    skipped = [row["why"] for row in lines(tmp_path / "run" / "skipped.jsonl")]
    assert skipped == ["not streamed: nothing says when its first token came", "status 400"]
    everything = "".join(file.read_text() for file in (tmp_path / "run").iterdir())
    assert "private" not in everything
    assert "secret" not in everything
    assert bodies_seen[1][1]["stream_options"] == {"include_usage": True}
    assert bodies_seen[1][2]["authorization"] == "Bearer secret"


def test_text_is_kept_when_requested_and_requests_can_be_left_untouched(tmp_path: Path) -> None:
    bodies = tmp_path / "bodies.jsonl"
    with answering() as (behind, requests), observing(behind, tmp_path / "run", untouched=True, bodies=bodies) as port:
        post(port, "/v1/completions", prompt="words", max_tokens=2, stream=True)
    assert requests[0][1] == {"prompt": "words", "max_tokens": 2, "stream": True}
    assert [row["body"]["prompt"] for row in lines(bodies)] == ["words"]
    assert "did not count its prompt's tokens" in lines(tmp_path / "run" / "skipped.jsonl")[0]["why"]


def test_no_server_behind_the_proxy_is_a_502(tmp_path: Path) -> None:
    with answering() as (behind, _):
        pass
    with observing(behind, tmp_path / "run") as port:
        status, body = post(port, "/v1/completions", prompt="x", max_tokens=2, stream=True)
    assert status == 502
    assert b"did not answer" in body
    assert lines(tmp_path / "run" / "skipped.jsonl")[0]["why"].startswith("the server did not answer")


def test_a_replay_is_a_run_with_the_recorded_lengths_and_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,prompt_tokens,output_tokens\n0.0,30,4\n0.1,12,6\n0.3,50,2\n")
    with answering() as (port, requests):
        words = ["--url", f"http://127.0.0.1:{port}", "-o", str(tmp_path / "run"), "--speed", "2"]
        before = time.monotonic()
        assert cli.run(["replay", str(trace), *words]) == 0
    run = read_measured_run(tmp_path / "run")
    assert run.by_client
    rows = {prompt: (answer, at) for prompt, answer, at in zip(run.prompts, run.answers, run.start, strict=True)}
    assert {prompt: answer for prompt, (answer, _) in rows.items()} == {30: 4, 12: 6, 50: 2}
    # Twice as fast: no request before its time. How late one may be is the machine's affair.
    assert [rows[prompt][1] - before >= at for prompt, at in ((30, 0.0), (12, 0.05), (50, 0.15))] == [True] * 3
    assert (run.meta or {})["cache_config"] == {
        "block_size": 16, "enable_prefix_caching": True, "gpu_memory_utilization": 0.9, "num_gpu_blocks": 1234
    }  # fmt: skip
    for _, document, _ in requests:
        assert document["ignore_eos"] is True
        assert document["min_tokens"] == document["max_tokens"]


def test_a_replay_may_be_of_a_run_and_through_the_proxy(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    row = '{{"input_toks": {0}, "output_toks": 3, "queued_ts": {1}, "first_token_ts": 9.5, "last_token_ts": 9.7}}\n'
    (tmp_path / "first" / "requests.jsonl").write_text(row.format(8, 9.0) + row.format(5, 8.9))
    with answering() as (behind, _), observing(behind, tmp_path / "observed") as port:
        words = ["--url", f"http://127.0.0.1:{port}", "-o", str(tmp_path / "replayed"), "--model", "small"]
        assert cli.run(["replay", str(tmp_path / "first"), *words]) == 0
    observed, replayed = (read_measured_run(tmp_path / name) for name in ("observed", "replayed"))
    assert observed.prompts.tolist() == replayed.prompts.tolist() == [5, 8]
    assert (observed.start >= replayed.start).all()
    assert (observed.last <= replayed.last + 1e-3).all()


def test_equal_prefix_ids_are_equal_tokens() -> None:
    blocks = IdLists.of([(7, 8), (7, 9), ()])
    trace = Trace("t", None, np.array([10, 10, 3]), np.array([1, 1, 1]), blocks, 4)
    one, two, three = prompts(trace, 1000)
    assert [len(one), len(two), len(three)] == [10, 10, 3]
    assert one[:4] == two[:4]
    assert one[4:8] != two[4:8]
    assert one[8:] != two[8:]
    assert min(one + two + three) >= 10


def test_a_stream_in_any_pieces_is_one_stream() -> None:
    events = (
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\r\n\r\n'
        b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n: ping\n\n'
        b'data: {"choices": [{"delta": {"content": ""}}]}\n\n'
        b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, 1000):
        stream = CompletionStream(hide_usage=True)
        passed = b"".join(stream.feed(events[i : i + size], float(i)) for i in range(0, len(events), size))
        assert (stream.chunks, stream.prompt_tokens, stream.output_tokens) == (2, 3, 2)
        assert b"usage" not in passed + stream.end()
        assert passed.count(b"\n\n") == 6
        if size == 1:
            assert stream.first == float(events.index(b": ping") - 1)


def test_settings_in_metrics() -> None:
    assert cache_settings("# HELP\n" + METRICS)["num_gpu_blocks"] == 1234
    assert cache_settings("nothing 1\n") == {}


FILES = {
    "t.csv": "arrival,prompt_tokens,output_tokens\n0,1,1\n",
    "n.csv": "prompt_tokens,output_tokens\n1,1\n",
    "other.csv": "a,b\n1,2\n",
    "empty.csv": "",
    "object.json": "{}",
    "spanless.json": '{"resourceSpans": []}',
    "broken.json": '{"resourceSpans": []}\nno',
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("observe --upstream ftp://x -o run", "--upstream: got 'ftp://x', expected a URL such as"),
        ("observe --upstream x:1 -o .", "--output: got '.', expected a folder that is empty"),
        ("observe --upstream x:1 -o run --port 70000", "--port: got 70000, expected a port"),
        ("observe -o run", "either this, or --spans"),
        ("observe -o run --vllm-log empty.csv", "empty.csv"),
        ("observe -o run --vllm-log other.csv", "other.csv: batch.decode_kv_tokens: expected a log of live.vllm.sched"),
        ("observe -o run --spans object.json", "expected OTLP-JSON"),
        ("observe -o run --spans spanless.json", "expected spans named llm_request"),
        ("observe -o run --spans broken.json", "broken.json:2: expected a JSON document"),
        ("replay t.csv --url 127.0.0.1:1 -o run", "--url: got '127.0.0.1:1', expected a server that"),
        ("replay t.csv --url 127.0.0.1:1 -o run --speed 0", "--speed: got 0.0, expected"),
        ("replay t.csv --url 127.0.0.1:1 -o run --slo itl_p99=9ms", "--slo: got 'itl_p99', expec"),
        ("replay n.csv --url 127.0.0.1:1 -o run", "n.csv: expected a trace with arrival times"),
    ],
)
def test_bad_input_is_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert message in refusal(*words.split())


def test_a_scenarios_workload_gets_a_verdict_on_each_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = {"distribution": "uniform", "low": 4, "high": 9}
    scenario = {
        "schema": "twin.scenario/1", "kind": "serving", "name": "small",
        "workload": {"requests": 8, "prefill": lengths, "decode": lengths,
                     "arrivals": {"process": "poisson", "rate": 40}},
        "engine": {"num_gpu_blocks": 100}, "step_time": {"source": "linear", "overhead": 0.004},
    }  # fmt: skip
    (tmp_path / "small.yaml").write_text(json.dumps(scenario))
    goals = ["ttft_p90=5s", "e2e_mean=10s", "output_throughput=1"]
    with answering() as (port, requests):
        words = ["replay", str(tmp_path / "small.yaml"), "--url", f"127.0.0.1:{port}"]
        words += [word for goal in goals for word in ("--slo", goal)]
        assert cli.run([*words, "-o", str(tmp_path / "met")]) == 0
        output = capsys.readouterr().out
        assert "8 requests: all goals are met" in output
        assert output.count("%  met\n") == 3
        assert cli.run([*words, "--slo", "tpot_mean=3ms", "-o", str(tmp_path / "missed")]) == 3
    output = capsys.readouterr().out
    assert "8 requests: not all goals are met" in output
    assert "tpot_mean" in next(line for line in output.splitlines() if "missed" in line)
    first, second = (lines(tmp_path / name / "requests.jsonl") for name in ("met", "missed"))
    assert [row["input_toks"] for row in first] == [row["input_toks"] for row in second]
    assert len(requests) == 16


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
    assert cli.run(["observe", "--vllm-log", str(tmp_path / "log.csv"), "-o", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().err
    assert "prompts beside decodes: 114 steps of up to 68 tokens and 6 decodes" in told
    assert cli.run(["calibrate", "steps", str(tmp_path / "run"), "-o", str(tmp_path / "steps.yaml"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["heldout_median_error"] < 0.01
    assert {row["name"] for row in document["unknowns"]} >= {"machine", "rows", "beyond"}
    model = read_engine_regression(tmp_path / "steps.yaml")
    decodes = [Sequence(Request(i, 0.0, 49, 9), i, False) for i in range(4)]
    assert model.seconds(DecodeBatch((), decodes, 200, 50)) == pytest.approx(0.0058, rel=0.02)


def test_what_a_log_lacks_is_said_and_a_run_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal
) -> None:
    write_log(tmp_path / "log.csv", prompts=False)
    command = ["observe", "--vllm-log", str(tmp_path / "log.csv"), "-o", str(tmp_path / "run")]
    assert cli.run(command) == 0
    assert "not seen: prompts alone" in capsys.readouterr().err
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
    assert cli.run(["observe", "--spans", "spans.json", "-o", "observed"]) == 0
    measured_run = read_measured_run(Path("observed"))
    assert measured_run.prompts.tolist() == [100, 101]
    # Without queue and prefill a request is queued as it arrives; with them, 0.4 s before its first token.
    assert measured_run.ttft.tolist() == pytest.approx([0.5, 0.4], abs=1e-6)
    assert measured_run.decoding.tolist() == pytest.approx([2.0, 2.0], abs=1e-6)
    assert measured_run.first[1] - measured_run.first[0] == pytest.approx(1.0, abs=1e-6)
    assert not measured_run.by_client
    (skipped,) = Path("observed/skipped.jsonl").read_text().splitlines()
    assert json.loads(skipped)["why"] == "no gen_ai.latency.e2e"
