"""One HTTP request and its response: the small part of ASGI that this server needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from json import JSONEncoder
from typing import Any, TypeAlias

from live.server.errors import ApiError, ClientDisconnected

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

JSON = "application/json"

DISCONNECT_WATCH_DELAY = 0.05
"""Seconds before the server watches for a client's disconnect. Most short responses end earlier and need no watcher."""

encode = JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""A document as JSON text. The encoder is made once: `json.dumps` makes one in each call with these options."""


class HttpExchange:
    """One HTTP request and its response.

    Attributes:
        method, path: of the request. started: whether a status has been sent. size: bytes of the body, once it is read.
    """

    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.started, self.size = False, 0
        self._watch: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self._headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        self._receive, self._send = receive, send

    def header(self, name: bytes) -> str:
        """The value of a header, "" without it. `name` is in lower case."""
        return next((value.decode("latin-1") for key, value in self._headers if key == name), "")

    async def body(self, max_bytes: int, seconds: float) -> bytes:
        """The request's body.

        Args:
            max_bytes: limit of its size. seconds: limit of its time.

        Raises:
            ApiError: 413 if it is too large, 408 if it takes too long.
            ClientDisconnected: the client closed its connection before the body was complete.
        """
        announced = self.header(b"content-length")
        if announced.isdecimal() and int(announced) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(seconds):
                return await self._whole_body(max_bytes)
        except TimeoutError:
            closing = (("connection", "close"),)
            raise ApiError(408, f"expected the body within {seconds:g} seconds", headers=closing) from None

    async def _whole_body(self, max_bytes: int) -> bytes:
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > max_bytes:
                raise _too_large(max_bytes)
        self.size = size
        return b"".join(parts)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call a function when the client disconnects, after `DISCONNECT_WATCH_DELAY` at the earliest.

        The body must have been read before.
        """

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            callback()

        def begin() -> None:
            self._watch = asyncio.create_task(watch())

        self._watch = asyncio.get_running_loop().call_later(DISCONNECT_WATCH_DELAY, begin)

    def close(self) -> None:
        """Stop watching for the client's disconnect."""
        if self._watch is not None:
            self._watch.cancel()

    async def reply(
        self, status: int, body: bytes, content_type: str = JSON, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Send a whole response."""
        await self._begin(status, content_type, (("content-length", str(len(body))), *headers))
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        """Begin a response of server-sent events, to be sent with `send_chunk`."""
        await self._begin(200, "text/event-stream; charset=utf-8", (("cache-control", "no-cache"),))

    async def send_chunk(self, body: bytes, last: bool = False) -> None:
        """Send one chunk of a stream."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _begin(self, status: int, content_type: str, headers: Iterable[tuple[str, str]]) -> None:
        self.started = True
        pairs = [
            (b"content-type", content_type.encode()),
            *((name.encode(), value.encode()) for name, value in headers),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


def to_bytes(document: object) -> bytes:
    """A document as UTF-8. Lone surrogates, which an error message may quote, become question marks."""
    return encode(document).encode(errors="replace")


def event(document: object) -> bytes:
    """A document as a server-sent event."""
    return b"data: %b\n\n" % to_bytes(document)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"expected a body of at most {max_bytes} bytes, found more", code="body_too_large")
