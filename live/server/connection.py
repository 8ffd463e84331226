"""HTTP/1.1 connections with limits on how long a client may take, which uvicorn does not have; the text of an event.

uvicorn's only time limit is for a connection that is idle between two requests. A `Connection` also ends when a
request's head does not arrive in time, when the rest of an already answered request's body does not, and when the
client does not read its response. The time limit for a body that is still needed is in `live.server.app`, which can
then respond with an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from json import JSONEncoder
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from live.server.options import ServerOptions
from live.server.replies import ApiError

CONNECTION = "live.connection"
"""The ASGI extension under which a request's scope has its `Connection`."""

MAX_HEAD = 64 << 10
"""Maximum size of a request's line and headers, bytes."""


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, with connections that have these limits."""

    def __init__(self, app: ASGIApp, limits: ServerOptions) -> None:
        super().__init__(
            app, http=Connection, ws="none", lifespan="off", loop="asyncio", access_log=False, log_level="warning",
            log_config=None, server_header=False, date_header=False, proxy_headers=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.limits = limits


class _Timer:
    """At most one callback at a time, called after some seconds unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, self._ring, callback, *args)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self, callback: Callable[..., None], *args: object) -> None:
        self._handle = None
        callback(*args)


class Connection(HttpToolsProtocol):
    """One client's connection.

    The head of a request must be complete `header_seconds` after the connection was made, or after the head's first
    byte on a reused connection; otherwise the server responds with 408. A client that does not read is disconnected,
    and its request sees the disconnect. A client does not read if bytes of a response wait, and `write_seconds` later
    neither all of them nor `HIGH_WATER_LIMIT` of them have gone.

    Attributes:
        on_writable: called when a client reads again, until which `flow.write_paused`.
    """

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._heads = 0  # heads begun
        self._head_bytes = 0  # of a head that came in parts
        self._in_head = self._in_body = False
        self._reading = _Timer(self.loop)
        self._writing = _Timer(self.loop)
        self.on_writable: Callable[[], None] | None = None

    @property
    def answering(self) -> bool:
        """True if a request has begun whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    # -- what the client sends ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.stop()
        self._writing.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_body and not self._reading.runs:  # also for bytes that begin no head, such as empty lines
            self._expect_head()
        continues, heads = self._in_head, self._heads
        super().data_received(data)
        if continues and self._in_head and heads == self._heads:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self._refuse(ApiError(431, f"expected a request line and headers of at most {MAX_HEAD} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]
        self._in_head = True
        self._head_bytes = 0
        self._heads += 1
        if not self._reading.runs:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._in_body = True
        self._reading.stop()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._reading.stop()
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._reading.start(self._limits.header_seconds, self._head_overdue)

    def _head_overdue(self) -> None:
        if self.answering:  # the head belongs to the next request, which cannot be answered yet
            self._expect_head()
        elif self._in_head:
            self._refuse(ApiError(408, f"expected the headers within {self._limits.header_seconds:g} seconds"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """End the connection with an error about a request's head, which the application has not seen."""
        if self.transport.is_closing():
            return
        body = json.dumps(error.document()).encode()
        lines = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + body)
        self.transport.close()
        self._watch_writing()

    # -- what the client reads ---------------------------------------------------------------------------------------

    def write_chunk(self, body: bytes) -> None:
        """Write a part of a response that has begun without a length, as ASGI's `send` does, but at once."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def on_response_complete(self) -> None:
        """uvicorn's callback when the application has sent its last byte."""
        super().on_response_complete()
        if self._in_body and not self.answering and not self.transport.is_closing():
            self._reading.start(self._limits.body_seconds, self.transport.close)
        self._watch_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.answering:
            self._writing.stop()
        if self.on_writable is not None:
            self.on_writable()

    def _watch_writing(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        if waiting and not self._writing.runs:
            self._writing.start(self._limits.write_seconds, self._check_writing, waiting)

    def _check_writing(self, waiting: int) -> None:
        if self.transport.get_write_buffer_size() > max(waiting - HIGH_WATER_LIMIT, 0):
            self.transport.abort()
        else:
            self._watch_writing()


def cut_off(server: uvicorn.Server) -> None:
    """Abort the connections that have an incomplete response; the application sees the clients disconnect."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, Connection) and connection.answering:
            connection.transport.abort()


DONE = b"data: [DONE]\n\n"
"""The end of every stream."""

encode = JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""A document as JSON text. The encoder is made once: `json.dumps` makes one in each call with these options."""


def to_bytes(document: object) -> bytes:
    """A document as UTF-8. Lone surrogates, which an error message may quote, become question marks."""
    return encode(document).encode(errors="replace")


def event(document: object) -> bytes:
    """A document as a server-sent event."""
    return b"data: %b\n\n" % to_bytes(document)
