"""The ASGI application: calls a request's endpoint, and sends its result or error as the response."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from pydantic import ValidationError

from live.server import openapi
from live.server.asgi import JSON, HttpExchange, Message, Receive, Send, event, to_bytes
from live.server.errors import INVALID, ApiError, ClientDisconnected, busy, invalid_body
from live.server.protocol import MAX_CONTAINERS, has_too_many_containers
from live.server.routes import ROUTES, Reply, Route
from live.server.service import Service

log = logging.getLogger("live.server")

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""

DONE = b"data: [DONE]\n\n"


class App:
    """The application of one service.

    Attributes:
        in_flight: requests with a body that are being answered, counted from the end of their bodies.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.in_flight = service, 0
        self._routes: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._key = f"Bearer {service.config.api_key}".encode()
        self._openapi = to_bytes(openapi.document(service.version, bool(service.config.api_key)))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """ASGI's entry point, called once for each request."""
        if scope["type"] != "http":
            return
        exchange = HttpExchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            if not self.service.draining:
                raise
            await self._refuse(exchange, busy(503, "the server stopped before the response was complete"))
        except ApiError as error:
            await self._refuse(exchange, error)
        except Exception as error:
            log.exception("%s %s", exchange.method, exchange.path)
            await self._refuse(exchange, ApiError(500, f"{type(error).__name__} in the server; its log says more"))
        finally:
            exchange.close()

    async def _answer(self, exchange: HttpExchange) -> None:
        if exchange.path == "/openapi.json" and exchange.method == "GET":
            await exchange.reply(200, self._openapi)
            return
        route = self._route(exchange)
        if route.requires_key:
            self._check_key(exchange)
        if route.body is None:
            await self._reply(exchange, await route.handler(self.service, None, exchange))
            return
        self.service.check_available(None)  # before the body: a server that shuts down does not wait for it
        body = await self._body(exchange)
        if self.in_flight >= self.service.config.limits.requests:
            raise busy(429, f"expected at most {self.service.config.limits.requests} concurrent requests")
        self.in_flight += 1
        try:
            request = await self.service.offload.run(len(body), partial(self._parse, body, route))
            self.service.check_available(request.model)
            await self._reply(exchange, await route.handler(self.service, request, exchange))
        finally:
            self.in_flight -= 1

    def _route(self, exchange: HttpExchange) -> Route:
        methods = self._routes.get(exchange.path)
        if methods is None:
            raise ApiError(404, f"no such path: {exchange.path}", code="not_found")
        if exchange.method not in methods:
            allowed = ", ".join(methods)
            raise ApiError(405, f"{exchange.path}: expected {allowed}", headers=(("allow", allowed),))
        return methods[exchange.method]

    def _check_key(self, exchange: HttpExchange) -> None:
        if not self.service.config.api_key:
            return
        header = exchange.header(b"authorization").encode("latin-1")
        if not hmac.compare_digest(header, self._key):
            raise ApiError(
                401, "expected the header Authorization: Bearer KEY", headers=(("www-authenticate", "Bearer"),)
            )

    async def _body(self, exchange: HttpExchange) -> bytes:
        content_type = exchange.header(b"content-type").partition(";")[0].strip().lower()
        if content_type != JSON:
            raise ApiError(415, f"expected the header Content-Type: {JSON}, found {content_type or 'none'}")
        limits = self.service.config.limits
        return await exchange.body(limits.body_bytes, limits.body_seconds)

    @staticmethod
    def _parse(body: bytes, route: Route) -> Any:
        """The request model that a body holds."""
        assert route.body is not None
        if has_too_many_containers(body):
            raise ApiError(400, f"expected at most {MAX_CONTAINERS} lists and objects in the body", code=INVALID)
        try:
            return route.body.validate_json(body)
        except ValidationError as error:
            raise invalid_body(error) from None

    async def _reply(self, exchange: HttpExchange, reply: Reply) -> None:
        if isinstance(reply, bytes):
            await exchange.reply(200, reply, PROMETHEUS_TEXT)
        elif isinstance(reply, AsyncIterator):
            await self._stream(exchange, reply)
        else:
            await exchange.reply(200, to_bytes(reply))

    async def _stream(self, exchange: HttpExchange, events: AsyncIterator[bytes]) -> None:
        """Send a stream. Nothing is sent before the first event exists: until then an error can have its own status."""
        try:
            first = await anext(events)
            await exchange.start_stream()
            await exchange.send_chunk(first)
            async for chunk in events:
                await exchange.send_chunk(chunk)
            await exchange.send_chunk(DONE, last=True)
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def _refuse(self, exchange: HttpExchange, error: ApiError) -> None:
        """Send an error as a response, or as the last event of a stream that has begun."""
        if exchange.started:
            await exchange.send_chunk(event(error.document()) + DONE, last=True)
        else:
            await exchange.reply(error.status, to_bytes(error.document()), headers=error.headers)
