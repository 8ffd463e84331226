"""Clients that send or read slowly, or not at all: none of them holds up others or the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Send
from uvicorn.server import ServerState

from live.models.decoder import Decoder
from live.server.connection import MAX_HEAD, Connection, ConnectionConfig
from live.server.options import ServerOptions
from tests.live.server.conftest import Setting, running
from tests.live.server.test_life import eventually

HEAD = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
STALLED = HEAD + b'content-length: 1000\r\n\r\n{"prompt": '
BODY = b'{"prompt": "a"}'
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@contextlib.contextmanager
def connected(setting: Setting, data: bytes = b"", receive_buffer: int = 0) -> Iterator[socket.socket]:
    """A connection over which something has been sent."""
    with contextlib.closing(socket.socket()) as connection:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", setting.client.port))
        connection.sendall(data)
        yield connection


def to_the_end(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def dribble(connection: socket.socket, byte: bytes) -> bytes:
    """The same, while one byte after the other is sent."""
    connection.settimeout(0.02)
    result = b""
    for _ in range(500):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(byte)
        try:
            part = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except ConnectionResetError:
            part = b""
        if not part:
            return result
        result += part
    raise AssertionError("the server did not close the connection")


@pytest.fixture(scope="module")
def strict(decoder: Decoder, folder: Path) -> Iterator[Setting]:
    """A server that waits for tenths of a second."""
    seconds = {"header_seconds": 0.2, "body_seconds": 0.4, "write_seconds": 0.2}
    with running(decoder, folder, max_concurrency=2, **seconds) as setting:
        yield setting
        assert setting.settled()


@pytest.mark.parametrize("data", [b"P", HEAD], ids=["a first byte", "all but the last"])
def test_a_head_that_does_not_come_in_time_is_answered_408(strict: Setting, data: bytes) -> None:
    with connected(strict, data) as connection:
        head, _, body = to_the_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert json.loads(body)["error"] == {
        "message": "expected the headers within 0.2 seconds", "type": "timeout_error", "param": None, "code": None,
    }  # fmt: skip


def test_a_head_that_comes_byte_by_byte_ends_too(strict: Setting) -> None:
    with connected(strict, HEAD + b"x-long: ") as connection:
        assert dribble(connection, b"a").startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("first", "byte"),
    [(b"", b""), (b"", b"\n"), (WHOLE, b"\n")],
    ids=["silent", "empty lines", "empty lines, used again"],
)
def test_a_connection_without_a_request_is_closed(strict: Setting, first: bytes, byte: bytes) -> None:
    with connected(strict, first) as connection:
        result = dribble(connection, byte) if byte else to_the_end(connection)
    assert result.startswith(b"HTTP/1.1 200") if first else result == b""


def test_a_head_without_end_is_refused(strict: Setting) -> None:
    with connected(strict, HEAD) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for i in range(3 * MAX_HEAD // 1000):
            connection.sendall(b"x-%d: " % i + b"a" * 1000 + b"\r\n")
            time.sleep(0.001)
    # The refusal may be lost with the reset that follows; that the connection ends is what counts.
    with connected(strict, HEAD + b"x: " + b"a" * 1000) as connection:
        time.sleep(0.05)
        connection.sendall(b"a" * (MAX_HEAD + 1))
        result = to_the_end(connection)
    assert result.startswith(b"HTTP/1.1 431") or result == b""


def test_stalled_bodies_hold_no_slots_and_are_answered_408(decoder: Decoder, folder: Path) -> None:
    with (
        running(decoder, folder, max_concurrency=2, body_seconds=1.0) as setting,
        contextlib.ExitStack() as stack,
    ):
        stalled = [stack.enter_context(connected(setting, STALLED)) for _ in range(5)]
        assert eventually(lambda: len(connections(setting)) == 5)
        assert setting.client.post("/tokenize", prompt="a").status == 200
        assert eventually(lambda: setting.stopping.app.in_flight == 0)
        for connection in stalled:
            result = to_the_end(connection)
            assert result.startswith(b"HTTP/1.1 408"), result
            assert b"expected the body within 1 seconds" in result


def test_a_body_that_nobody_wants_does_not_keep_the_connection(strict: Setting) -> None:
    with connected(strict, STALLED.replace(b"/tokenize", b"/nowhere")) as connection:
        assert dribble(connection, b" ").startswith(b"HTTP/1.1 404")


def connections(setting: Setting) -> list[Any]:
    """Requests that are not answered to their end."""
    return [row for row in setting.stopping.server.server_state.connections if row.answering]  # type: ignore[union-attr]


def unread_stream(setting: Setting) -> contextlib.AbstractContextManager[socket.socket]:
    """A stream of more than the system's small buffers hold, whose client reads nothing."""
    (listener,) = setting.stopping.server.servers[0].sockets
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    executor = setting.engine.executor
    launch = executor.launch
    executor.launch = lambda batch: (time.sleep(0.01), launch(batch))[1]  # type: ignore[method-assign]
    fields = {"prompt": [1], "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 4, "logprobs": 20}
    body = json.dumps(fields).encode()
    head = HEAD.replace(b"/tokenize", b"/v1/completions") + b"content-length: %d\r\n\r\n" % len(body)
    return connected(setting, head + body, receive_buffer=4096)


def test_a_client_that_does_not_read_is_cut_off_and_its_blocks_freed(decoder: Decoder, folder: Path) -> None:
    with running(decoder, folder, write_seconds=0.2) as setting:
        with unread_stream(setting):
            assert eventually(lambda: len(setting.engine.core.sequences) == 4)
            assert eventually(lambda: not setting.engine.core.sequences, 20)
            assert eventually(lambda: setting.stopping.app.in_flight == 0)
        assert setting.settled()
        assert setting.service.stats.reasons == {"abort": 4}


@pytest.mark.parametrize("what", ["an answer that is not read", "a body that does not come"])
def test_a_drain_ends_quietly(
    decoder: Decoder, folder: Path, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("live.server.launcher.CUT_OFF_SECONDS", 0.1)
    unread = what == "an answer that is not read"
    with running(decoder, folder, write_seconds=60, drain_seconds=0.1) as setting:
        with unread_stream(setting) if unread else connected(setting, STALLED):
            assert eventually(lambda: len(connections(setting)) == 1)
            if unread:
                assert eventually(lambda: all(row.flow.write_paused for row in connections(setting)), 20)
            with caplog.at_level(logging.INFO, logger="uvicorn.error"):
                setting.on_loop(setting.stopping.stop)
                setting.thread.join(10)
        assert setting.ended == [int(unread)]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- the limit for reading, without a socket -----------------------------------------------------------------------


class Clock(asyncio.AbstractEventLoop):
    """A loop that only keeps timers."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        self.timers.append(asyncio.TimerHandle(delay, callback, args, self))
        return self.timers[-1]

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.timers.remove(handle)

    def ring(self) -> None:
        """Let the only timer run out."""
        (timer,) = self.timers
        self.timers.clear()
        timer._run()


class Transport(asyncio.Transport):
    """One whose client takes what the test says."""

    waiting, aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


async def nothing(scope: Message, receive: Receive, send: Send) -> None:
    """An application that is never asked."""


@pytest.mark.parametrize(
    ("waiting", "aborted"),
    [
        ([300_000, 200_000, 100_000, 30_000, 0], False),
        ([300_000, 240_000], True),
        ([300_000, 200_000, 199_000], True),
        ([1000, 0], False),
        ([1000, 999], True),
    ],
)
def test_a_client_must_take_64_kib_or_all_that_waits(waiting: list[int], aborted: bool) -> None:
    clock, transport = Clock(), Transport()
    connection = Connection(ConnectionConfig(nothing, ServerOptions(write_seconds=7)), ServerState(), {}, clock)
    connection.connection_made(transport)
    connection._reading.stop()
    transport.waiting = waiting[0]
    connection.pause_writing()
    assert clock.timers[0].when() == 7
    for remainder in waiting[1:]:
        assert not transport.aborted
        transport.waiting = remainder
        clock.ring()
    assert (transport.aborted, clock.timers) == (aborted, [])


def test_an_answer_that_goes_on_stops_the_clock() -> None:
    clock, transport = Clock(), Transport()
    connection = Connection(ConnectionConfig(nothing, ServerOptions()), ServerState(), {}, clock)
    connection.connection_made(transport)
    connection._reading.stop()
    connection.cycle = type("Cycle", (), {"response_complete": False})()  # type: ignore[assignment]
    transport.waiting = 70_000
    connection.pause_writing()
    transport.waiting = 10_000
    connection.resume_writing()
    assert clock.timers == []
