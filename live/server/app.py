"""The web application, on Starlette: reads a request, has its endpoint answer it, and sends the result or an error.

A task for each stream sends its first event and its end. To wake it for each token would take the event loop several
times as long as the event itself, so the events between are written where tokens are delivered
(`live.server.service`), which limits the time that this takes. A stream that waits for its turn, or for a client that
does not read, gets all that has come by then as one event.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from pydantic import ValidationError
from starlette import responses
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from live.server.connection import CONNECTION, DONE, Connection, event, to_bytes
from live.server.protocol import MAX_CONTAINERS, Operation, has_too_many_containers, openapi_document
from live.server.replies import INVALID, ApiError, busy, invalid_body
from live.server.request_state import Response
from live.server.service import Service

log = logging.getLogger("live.server")

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""

DISCONNECT_WATCH_DELAY = 0.05
"""Seconds before the server watches for a client's disconnect. Most short responses end earlier and need no watcher."""

LARGE = 16 << 10
"""Bytes of a body from which its text and JSON are handled in a thread: below, they take less than milliseconds."""

THREADS = 2
"""A second one, so that one very long text does not hold up all other large requests."""

STOPPED = "the server stopped before the response was complete"

STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"content-type", b"text/event-stream; charset=utf-8")]

Result: TypeAlias = Mapping[str, Any] | bytes | Response
"""A document, a page of text, or a response whose generations have to run."""


class App(Starlette):
    """The application of one service, with an endpoint for each operation.

    Attributes:
        in_flight: requests with a body that are being answered, counted from the end of their bodies.
        threads: handle the text and JSON of large requests, which would hold up the event loop. Code in them may read
            the service and raise its errors, but must not change what the event loop uses.
    """

    def __init__(self, service: Service, operations: Sequence[Operation]) -> None:
        self.service = service
        self.in_flight = 0
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="live.server")
        routes = [_route(operation.path, operation.method, Endpoint(self, operation)) for operation in operations]
        document = openapi_document(operations, service.version, bool(service.config.options.api_key))
        routes.append(_route("/openapi.json", "GET", JSONResponse(document)))
        super().__init__(routes=routes, exception_handlers={HTTPException: _no_such_endpoint})
        self.router.redirect_slashes = False


class Endpoint:
    """The ASGI application of one operation."""

    def __init__(self, app: App, operation: Operation) -> None:
        self.app = app
        self.service = app.service
        self.operation = operation
        self._key = f"Bearer {app.service.config.options.api_key}".encode() if operation.requires_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            await self._respond(request, send)
        except ClientDisconnect:
            pass
        except Exception as error:
            await error_response(_as_api_error(error, request))(scope, receive, send)

    async def _respond(self, request: Request, send: Send) -> None:
        self._check_key(request)
        service = self.service
        if self.operation.body is None:
            result = self.operation.handler(service, None, request.headers)
            is_page = isinstance(result, bytes)
            response = responses.Response(result, media_type=PROMETHEUS_TEXT) if is_page else JSONResponse(result)
            await response(request.scope, request.receive, send)
            return
        service.check_available(None)  # before the body: a server that shuts down does not wait for it
        body = await self._body(request)
        if self.app.in_flight >= service.config.options.max_concurrency:
            raise busy(429, f"expected at most {service.config.options.max_concurrency} concurrent requests")
        self.app.in_flight += 1
        try:
            await self._answer(request, body, send)
        finally:
            self.app.in_flight -= 1

    def _check_key(self, request: Request) -> None:
        if not self.operation.requires_key or not self.service.config.options.api_key:
            return
        header = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(header, self._key):
            headers = (("www-authenticate", "Bearer"),)
            raise ApiError(401, "expected the header Authorization: Bearer KEY", headers=headers)

    async def _body(self, request: Request) -> bytes:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, f"expected the header Content-Type: application/json, found {content_type or 'none'}")
        limits = self.service.config.options
        too_large = f"expected a body of at most {limits.body_bytes} bytes, found more"
        size = request.headers.get("content-length", "")
        if size.isdecimal() and int(size) > limits.body_bytes:
            raise ApiError(413, too_large, code="body_too_large")
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limits.body_bytes:
                        raise ApiError(413, too_large, code="body_too_large")
        except TimeoutError:
            headers = (("connection", "close"),)
            raise ApiError(408, f"expected the body within {limits.body_seconds:g} seconds", headers=headers) from None
        return bytes(body)

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        """Have the endpoint answer, and send the result. The client's disconnect ends both."""
        watch = DisconnectWatch(request)
        try:
            if len(body) < LARGE:
                result = self._result(body, request.headers)
            else:
                result = await self._result_of_thread(body, request.headers)
            if isinstance(result, Response):
                await self._run(result, request, send)
            else:
                await JSONResponse(result)(request.scope, request.receive, send)
        except asyncio.CancelledError:
            if watch.disconnected:
                raise ClientDisconnect from None
            raise
        finally:
            watch.close()

    async def _result_of_thread(self, body: bytes, headers: Mapping[str, str]) -> Result:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.app.threads, self._result, body, headers)
        except asyncio.CancelledError:
            if not self.service.draining:
                raise
            raise busy(503, STOPPED) from None

    def _result(self, body: bytes, headers: Mapping[str, str]) -> Result:
        """The endpoint's answer to a body."""
        assert self.operation.body is not None
        if has_too_many_containers(body):
            raise ApiError(400, f"expected at most {MAX_CONTAINERS} lists and objects in the body", code=INVALID)
        try:
            request = self.operation.body.validate_json(body)
        except ValidationError as error:
            raise invalid_body(error) from None
        self.service.check_available(request.model)
        result: Result = self.operation.handler(self.service, request, headers)
        return result

    async def _run(self, response: Response, request: Request, send: Send) -> None:
        """Run a response's generations, and send it whole or as a stream.

        Nothing of a stream is sent before the first event exists: until then an error can have its own status.
        """
        states = response.states
        if response.stream:
            await self._stream(response, request, send)
            return
        with self.service.running(states):
            while not all(state.finished for state in states):
                await self.service.changed(states)
        await JSONResponse(response.document())(request.scope, request.receive, send)

    async def _stream(self, response: Response, request: Request, send: Send) -> None:
        """Run a response's generations, and send its events. An error after the first of them is the last."""
        states, started = response.states, False
        stream = EventStream(response, request.scope["extensions"][CONNECTION])
        try:
            with self.service.running(states):
                while not all(state.ended for state in states):
                    await self.service.changed(states)
                    if stream.error is not None:
                        raise stream.error
                    if started:
                        stream.write()
                    elif events := response.events():
                        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                        started = True
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                        stream.open()
                        stream.write()
            last = response.last_events()
        except Exception as error:
            if not started:
                raise
            last = event(_as_api_error(error, request).document())
        finally:
            stream.close()
        await send({"type": "http.response.body", "body": last + DONE})


class DisconnectWatch:
    """Cancels the present task when the client disconnects, after `DISCONNECT_WATCH_DELAY` at the earliest.

    Attributes:
        disconnected: whether it has.
    """

    def __init__(self, request: Request) -> None:
        self.disconnected = False
        self._receive = request.receive
        self._answering = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(DISCONNECT_WATCH_DELAY, self._begin)
        self._watching: asyncio.Task[None] | None = None

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        assert self._answering is not None
        self._answering.cancel()

    def close(self) -> None:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()


class JSONResponse(responses.JSONResponse):
    """A JSON document, encoded by `to_bytes`."""

    def render(self, content: Any) -> bytes:
        return to_bytes(content)


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.document(), error.status, dict(error.headers))


def _as_api_error(error: Exception, request: Request) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("%s %s", request.method, request.scope["path"], exc_info=error)
    return ApiError(500, f"{type(error).__name__} in the server; its log says more")


def _route(path: str, method: str, endpoint: Any) -> Route:
    route = Route(path, endpoint, methods=[method])
    route.methods = {method}  # without HEAD
    return route


async def _no_such_endpoint(request: Request, error: Exception) -> JSONResponse:
    """The response to a path or a method that has no endpoint."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        return error_response(ApiError(404, f"no such path: {path}", code="not_found"))
    methods = (error.headers or {})["Allow"]
    return error_response(ApiError(405, f"{path}: expected {methods}", headers=(("allow", methods),)))


class EventStream:
    """The events of one response on its connection.

    The task that runs the response sends the first events. From `open` on, new ones are written where tokens are
    delivered, and `changed` is set when there is something left for the task to do.

    Attributes:
        error: what went wrong in a delivery; the task is to end the stream with it.
    """

    def __init__(self, response: Response, connection: Connection) -> None:
        self._response = response
        self._connection = connection
        self._changed: asyncio.Event = response.states[0].changed
        self.error: Exception | None = None

    def open(self) -> None:
        """Write from now on; the response has begun, and its first events have been sent."""
        self._connection.on_writable = self._resume
        for state in self._response.states:
            state.on_tokens = self.write

    def close(self) -> None:
        """Write no longer."""
        self._connection.on_writable = None
        for state in self._response.states:
            state.on_tokens = None

    def write(self) -> None:
        """Write all new events, unless the client does not read."""
        connection = self._connection
        if connection.flow.write_paused:
            return
        try:
            if events := self._response.events():
                connection.write_chunk(events)
        except Exception as error:  # of one stream, which must not stop the step that delivers to all
            self.error = error
            self._changed.set()

    def _resume(self) -> None:
        """Write what has come while the client did not read, and let the task see whether this was the last."""
        self.write()
        self._changed.set()
