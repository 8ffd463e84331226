"""How requests and the server end: clients that leave, engines that fail, signals, sudden death."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.models.decoder import Decoder
from tests.live.server.conftest import Setting, answer_alone, config, running
from tests.live.server.wire import Client, read_events

LONG = {"prompt": [1, 2, 3], "max_tokens": 250, "ignore_eos": True, "stream": True, "temperature": 0}


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Tell whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.01)
    return False


@contextlib.contextmanager
def open_stream(port: int, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """A stream of which the head and an event have come; its client leaves at the end of the block."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        body = json.dumps({**LONG, **fields})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            yield response


def test_a_client_that_leaves_frees_its_blocks(decoder: Decoder, folder: Path) -> None:
    with running(decoder, folder) as setting:
        core = setting.engine.core
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(open_stream(setting.client.port))
            assert core.kv_cache.num_free_blocks < core.kv_cache.num_blocks
        assert eventually(lambda: not core.sequences)
        assert setting.settled()
        assert setting.service.stats.reasons["abort"] == 3


def test_a_client_that_leaves_before_the_answer_begins(decoder: Decoder, folder: Path) -> None:
    with running(decoder, folder) as setting:
        body = json.dumps({**LONG, "stream": False, "n": 4}).encode()
        with socket.create_connection(("127.0.0.1", setting.client.port)) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            connection.sendall(request)
            assert eventually(lambda: len(setting.engine.core.sequences) == 4)
        assert eventually(lambda: not setting.engine.core.sequences)
        with socket.create_connection(("127.0.0.1", setting.client.port)) as connection:
            connection.sendall(request[:-10])
        assert eventually(lambda: setting.settled())
        assert setting.service.stats.reasons == {"abort": 4}


def test_an_engine_that_fails_is_told_to_everybody(
    decoder: Decoder, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(decoder, folder) as setting, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(open_stream(setting.client.port)) for _ in range(2)]
        answers: list[Any] = []
        plain = threading.Thread(
            target=lambda: answers.append(setting.client.post("/v1/completions", prompt=[4], max_tokens=250, n=2))
        )
        plain.start()
        assert eventually(lambda: len(setting.engine.core.sequences) == 4)

        def broken(batch: object) -> None:
            raise RuntimeError("out of memory, say")

        setting.on_engine(lambda: setattr(setting.engine.executor, "launch", broken))
        for response in streams:
            *_, last = read_events(response)
            assert "out of memory, say" in last["error"]["message"]
            assert last["error"]["code"] == "engine_failed"
        plain.join(10)
        assert (answers[0].status, answers[0].error["code"]) == (503, "engine_failed")
        for answer in (setting.client.get("/health"), setting.client.post("/v1/completions", prompt=[1])):
            assert (answer.status, answer.error["code"]) == (503, "engine_failed")
        assert setting.service.stats.reasons["error"] == 4
        assert not setting.service.request_states
    assert "out of memory" in caplog.text


def test_a_defect_is_an_error_of_its_own_request(
    decoder: Decoder, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("a defect")

    with running(decoder, folder) as setting:
        with open_stream(setting.client.port) as response:
            monkeypatch.setattr("live.server.completions.CompletionResponse.deltas", broken)
            *_, last = read_events(response)
            assert last["error"]["message"] == "RuntimeError in the server; its log says more"
        monkeypatch.setattr(setting.service.inputs, "encode", broken)
        answer = setting.client.post("/tokenize", prompt="a")
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert eventually(setting.settled)
        assert setting.client.get("/health").status == 200
    assert caplog.text.count("RuntimeError: a defect") == 2


def test_what_is_under_way_is_finished_and_what_is_new_refused(decoder: Decoder, folder: Path) -> None:
    first = answer_alone(decoder, LONG["prompt"], 250).output
    with (
        running(decoder, folder, drain_seconds=20) as setting,
        open_stream(setting.client.port, return_token_ids=True) as response,
    ):
        setting.on_loop(setting.stopping.stop)
        for answer in (setting.client.post("/v1/completions", prompt=[1]), setting.client.get("/health")):
            assert answer.status == 503
            assert "shutting down" in answer.error["message"]
        tail = [token for piece in read_events(response) for token in piece["choices"][0]["token_ids"]]
        assert tail == first[len(first) - len(tail) :]
        assert len(tail) >= 240
        setting.thread.join(10)
        assert setting.ended == [0]


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_a_drain_that_takes_too_long_is_cut_short_and_said(decoder: Decoder, folder: Path, how: str) -> None:
    with running(decoder, folder, drain_seconds=0.1 if how == "timeout" else 60) as setting:
        executor = setting.engine.executor
        launch = executor.launch
        executor.launch = lambda batch: (time.sleep(0.05), launch(batch))[1]  # type: ignore[method-assign]
        with open_stream(setting.client.port) as response:
            setting.on_loop(setting.stopping.stop)
            if how == "second signal":
                setting.on_loop(setting.stopping.stop)
            *_, last = read_events(response)
        assert "stopped before" in last["error"]["message"]
        setting.thread.join(10)
        assert setting.ended == [1]


# -- a process of its own ------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A server, its port, and the line that it printed."""

    process: subprocess.Popen[str]
    port: int
    line: str


@contextlib.contextmanager
def started(folder: Path, port: int = 0, *flags: str) -> Iterator[Process]:
    """`python -m live.server`."""
    command = [sys.executable, "-m", "live.server", "--model", str(folder / "config.json"), "--random-weights"]
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--num-gpu-blocks", "200", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), process.stderr.read() if process.stderr else line
        yield Process(process, int(line.split(":")[2].split()[0]), line)
    finally:
        process.kill()
        process.communicate()


def test_after_sudden_death_the_port_serves_again_and_sigterm_finishes_what_is_under_way(folder: Path) -> None:
    with started(folder) as server:
        with open_stream(server.port) as response:
            server.process.kill()
            with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
                response.read()
        server.process.wait(timeout=10)
        with pytest.raises(ConnectionRefusedError):
            Client(server.port).get("/health")
    with started(folder, server.port) as again, open_stream(again.port) as response:
        assert again.port == server.port
        assert again.line.endswith("serves config: 200 blocks of 16 tokens, contexts of up to 256; token ids only\n")
        again.process.send_signal(signal.SIGTERM)
        *_, last = read_events(response)
        assert last["choices"][0]["finish_reason"] == "length"
        out, err = again.process.communicate(timeout=20)
        assert (again.process.returncode, out, err) == (0, "", "")


CLIENTS = 200


async def client(port: int, fields: dict[str, Any], leave_after: float | None) -> list[int] | None:
    """The token ids of a streamed answer; None for who has left before its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            async with asyncio.timeout(leave_after):
                answer = await reader.read()
        except TimeoutError:
            return None
    finally:
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: ")]
    assert lines.count(b"[DONE]") == 1
    assert lines[-1] == b"[DONE]"
    pieces = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [piece["finish_reason"] for piece in pieces].count("length") == 1, "answered twice, or not to the end"
    assert pieces[-1]["finish_reason"] == "length"
    return [token for piece in pieces for token in piece["token_ids"]]


@pytest.mark.parametrize(
    "ahead",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["waiting for each step", "a step ahead"],
)
def test_nothing_is_lost_and_nothing_answered_twice(ahead: bool, decoder: Decoder, folder: Path) -> None:
    rng = np.random.default_rng(4)
    common = rng.integers(0, 256, 12).tolist()
    kinds = [
        (common * int(i % 3 == 0) + rng.integers(0, 256, int(rng.integers(1, 30))).tolist(), int(rng.integers(1, 24)))
        for i in range(40)
    ]
    expected = [answer_alone(decoder, prompt, max_tokens).output for prompt, max_tokens in kinds]
    leaving = random.Random(9)
    leave = [leaving.uniform(0.0, 1.5) if i % 4 == 0 else None for i in range(CLIENTS)]

    async def everybody(port: int) -> list[list[int] | None]:
        fields = [
            {
                "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
                "return_token_ids": True,
            }
            for prompt, max_tokens in kinds
        ]  # fmt: skip
        return await asyncio.gather(*(client(port, fields[i % 40], leave[i]) for i in range(CLIENTS)))

    small = config(num_gpu_blocks=40, max_num_seqs=16, max_num_batched_tokens=64)
    with running(decoder, folder, engine=small, ahead=ahead) as setting:
        answers = asyncio.run(everybody(setting.client.port))
        check(setting, answers, expected)


def check(setting: Setting, answers: list[list[int] | None], expected: list[list[int]]) -> None:
    """Each client that stayed has the answer that it would have had alone; nothing is left behind."""
    stayed = [i for i in range(CLIENTS) if i % 4]
    for i in stayed:
        assert answers[i] == expected[i % 40], f"client {i}"
    assert eventually(setting.settled)
    core, reasons = setting.engine.core, setting.service.stats.reasons
    assert core.preemptions > 0
    assert core.cached_tokens > 0
    assert reasons["abort"] > 5
    assert sum(reasons.values()) <= CLIENTS
    full = sum(answer is not None for answer in answers)
    assert reasons["length"] >= full >= len(stayed)
    assert reasons["error"] == 0
