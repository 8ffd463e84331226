"""Profiles and replays of vLLM's server, against a stand-in that logs its steps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from live.generation import Generation, make_generation
from live.validation.backend import materialise
from live.validation.profiling import ProfilingLimits
from live.vllm import server as server_module
from live.vllm.server import ServerProfile, VllmServer, flags, replay_served
from live.vllm.step_log import LoggedEngine, ScheduledChunk, ScheduledStep, StepLogReader, StepLogWriter
from schedulers.batches import DecodeBatch, MixedBatch
from workloads.errors import BadInput, TwinError
from workloads.request import Request

ROUTE, STEP, DELIVER = 0.004, 0.002, 0.003


class OneByOne(VllmServer):
    """Answers a request after those before it, by a clock that only its own work advances, or by the wall clock."""

    def __init__(self, log: Path) -> None:
        self.writer = StepLogWriter(log, LoggedEngine("one", "", "tiny", "wall", 1, 100, 32))
        self.now = 0.0
        self.clock = time.perf_counter
        self._log = StepLogReader(log)
        self._turn = threading.Lock()

    def pass_time(self, seconds: float) -> float:
        self.now += seconds
        return self.clock()

    def answer(self, generation: Generation, clock: Callable[[], float]) -> int:
        prompt = generation.request.prompt_tokens
        with self._turn:
            begin = self.pass_time(ROUTE)
            for token in range(generation.request.max_tokens):
                chunks = [] if token else [ScheduledChunk("p", prompt, 0, True)]
                decodes = ["d"] if token else []
                step = ScheduledStep(chunks, decodes, len(decodes), token and prompt + token, token and prompt + token)
                end = self.pass_time(STEP)
                self.writer.write(step, begin, end, 0.1)
                begin = self.pass_time(DELIVER)
                generation.output.append(token)
                generation.times.append(clock())
            self.writer.flush()
        generation.first_token, generation.last_token = generation.times[0], generation.times[-1]
        return 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OneByOne]:
    server = OneByOne(tmp_path / "log.csv")
    yield server
    server.writer.close()


def test_a_profile_has_steps_and_the_way_to_them(server: OneByOne, monkeypatch: pytest.MonkeyPatch) -> None:
    server.clock = lambda: server.now
    monkeypatch.setattr(server_module, "time", SimpleNamespace(**{**vars(time), "perf_counter": server.clock}))
    limits = ProfilingLimits(40, 6, 3, rounds=4, max_steps=8)
    result = ServerProfile(server, 100, limits, 32, seed=1).run(4)
    steps = [step for steps in result.rounds for _, step in steps]
    assert len(result.rounds) == 4
    assert [step.seconds for step in steps] == pytest.approx([STEP] * len(steps), abs=2e-7)
    assert {(step.decodes, step.chunks) for step in steps} == {(0, 1), (1, 0)}
    assert sum(step.outputs for step in steps) >= 4 * (4 + 8)  # in each round four requests of one token, and a client
    assert result.frontend == {"route": pytest.approx(ROUTE, abs=2e-7), "deliver": pytest.approx(DELIVER, abs=2e-7)}


def test_a_replay_has_the_requests_and_their_steps(server: OneByOne) -> None:
    requests = [(Request(i, 0.01 * i, 20 + i, 3), 3) for i in range(4)]
    generations = [materialise(request, answer, 100, 32) for request, answer in requests]
    result = replay_served(server, generations, None)
    columns = result.requests
    assert columns["output_tokens"].tolist() == [3.0] * 4
    assert (columns["noticed"] >= columns["arrival"]).all()
    assert sorted(batch.prefill_tokens for batch, _, _ in result.spans if batch.chunks) == [20, 21, 22, 23]
    assert result.spans[0][1] >= columns["arrival"][0]
    assert result.spans[-1][2] <= columns["last_token"].max()


def test_a_log_that_lacks_tokens_is_refused(server: OneByOne, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LOG_SECONDS", 0.05)
    server.answer(make_generation(1, [1, 2], 3), time.perf_counter)
    with pytest.raises(TwinError, match="3 tokens of 4"):
        server.steps(4)


def test_rows_of_a_log_are_batches(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    writer = StepLogWriter(file, LoggedEngine("a, b", "", "tiny", "wall", 1, 100, 32))
    chunks = [ScheduledChunk("a", 30, 64, True), ScheduledChunk("b", 10, 0, False)]
    reader = StepLogReader(file)
    writer.write(ScheduledStep(chunks, ["d", "e"], 2, 90, 60), 1.0, 1.25, 0.1)
    writer.flush()
    [(batch, begin, end)] = reader.read()
    assert isinstance(batch, MixedBatch)
    assert [(chunk.context, chunk.tokens) for chunk in batch.chunks] == [(64, 30), (0, 10)]
    assert (batch.outputs, batch.n_decodes, batch.decode_kv, batch.longest_decode) == (3, 2, 90, 60)
    assert (begin, end) == (pytest.approx(1.0), 1.25)
    writer.write(ScheduledStep([], ["d"], 1, 61, 61), 1.25, 1.5, 0.1)
    writer.close()
    assert [type(batch) for batch, _, _ in reader.read()] == [DecodeBatch]


def test_an_answer_is_read_as_it_comes(server: OneByOne) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(400 if body["prompt"] == [7] else 200)
            self.end_headers()
            tokens = {"choices": [{"token_ids": [3, 4]}]}
            usage = {"usage": {"prompt_tokens_details": {"cached_tokens": 1}}, "choices": []}
            events = {3: [{"error": {"message": "EngineDeadError"}}], 2: [tokens, usage, "[DONE]"], 1: [tokens]}
            for event in events[len(body["prompt"])]:
                self.wfile.write(f"data: {event if event == '[DONE]' else json.dumps(event)}\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        server._port = http.server_port
        ticks = iter([1.0, 2.0])
        generation = make_generation(1, [5, 6], 3)
        assert VllmServer.answer(server, generation, lambda: next(ticks)) == 1
        assert (generation.output, generation.times) == ([3, 4], [1.0, 1.0])
        for prompt, error in (([7], "status 400"), ([8], "breaks off"), ([8, 8, 8], "EngineDeadError")):
            with pytest.raises(TwinError, match=error):
                VllmServer.answer(server, make_generation(2, prompt, 3), time.perf_counter)
        http.shutdown()


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MODULE", "no_such_module")
    with pytest.raises(BadInput, match=r"settings that vLLM accepts: .*No module named no_such_module"):
        VllmServer({}, 1, tmp_path / "log.csv")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's end on Linux")
def test_a_server_ends_with_a_killed_parent() -> None:
    code = """if True:
        import subprocess, sys, time
        from live.vllm.settings import end_with_parent
        child = "import time; print(1, flush=True); time.sleep(5); print(2)"
        subprocess.Popen([sys.executable, "-c", child], preexec_fn=end_with_parent)
        time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"
        parent.kill()
        assert not parent.stdout.read()  # ends when the child, which has it too, has ended


def test_arguments_are_flags() -> None:
    arguments = {"block_size": 32, "enforce_eager": True, "async_scheduling": False, "additional_config": {"a": 1}}
    assert flags(arguments) == [
        "--block-size", "32", "--enforce-eager", "--no-async-scheduling", "--additional-config", '{"a": 1}',
    ]  # fmt: skip
