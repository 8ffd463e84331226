"""One HTTP request, and what is sent for it: the little of ASGI that this server needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from json import JSONEncoder
from typing import Any, TypeAlias

from live.server.errors import ApiError, ClientGone

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

JSON = "application/json"

PATIENCE = 0.05
"""Seconds for which nobody looks whether the client is still there: most short answers need no watcher at all."""

encode = JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""A document as JSON text. Made once: `json.dumps` makes an encoder a call when it is not asked for the default."""


class Exchange:
    """One request and its answer.

    Attributes:
        method, path: as they came. started: whether a status has been sent.
    """

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.started = False
        self._watch: asyncio.TimerHandle | asyncio.Task[None] | None = None  # who looks out for the client, or will
        self._headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        self._receive, self._send = receive, send

    def header(self, name: bytes) -> str:
        """A header's value, "" without it. `name` in lower case."""
        return next((value.decode("latin-1") for key, value in self._headers if key == name), "")

    async def body(self, most: int) -> bytes:
        """The request's body.

        Raises:
            ApiError: 413 when it has more than `most` bytes.
            ClientGone: before it was whole.
        """
        announced = self.header(b"content-length")
        if announced.isdecimal() and int(announced) > most:
            raise _too_large(most)
        body: bytes = b""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > most:
                raise _too_large(most)
            if not message.get("more_body", False):
                return body

    def when_gone(self, tell: Callable[[], None]) -> None:
        """Have a function called when the client leaves, after `PATIENCE` at the earliest. The body has been read."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            tell()

        def begin() -> None:
            self._watch = asyncio.create_task(watch())

        self._watch = asyncio.get_running_loop().call_later(PATIENCE, begin)

    def finish(self) -> None:
        """Nobody looks out for the client any more."""
        if self._watch is not None:
            self._watch.cancel()

    async def reply(self, status: int, body: bytes, kind: str = JSON, headers: Iterable[tuple[str, str]] = ()) -> None:
        """The whole answer."""
        await self._begin(status, kind, (("content-length", str(len(body))), *headers))
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """An answer of server-sent events, which come with `more`."""
        await self._begin(200, "text/event-stream; charset=utf-8", (("cache-control", "no-cache"),))

    async def more(self, body: bytes, last: bool = False) -> None:
        """A piece of the stream."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _begin(self, status: int, kind: str, headers: Iterable[tuple[str, str]]) -> None:
        self.started = True
        pairs = [(b"content-type", kind.encode()), *((name.encode(), value.encode()) for name, value in headers)]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


def event(document: object) -> bytes:
    """A server-sent event."""
    return f"data: {encode(document)}\n\n".encode()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"expected a body of at most {most} bytes, found more", code="body_too_large")
