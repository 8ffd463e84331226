"""The ASGI application: from a request to its endpoint, and from whatever happens there to an answer."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError

from live.server import openapi
from live.server.errors import ApiError, ClientGone, busy, unusable
from live.server.exchange import JSON, Exchange, Message, Receive, Send, encode, event
from live.server.routes import ROUTES, Reply, Route
from live.server.service import Service

log = logging.getLogger("live.server")

PAGE = "text/plain; version=0.0.4; charset=utf-8"
"""Of Prometheus' text format."""

DONE = b"data: [DONE]\n\n"


class App:
    """The application of one service.

    Attributes:
        in_flight: requests that are being answered, but for those that only look.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.in_flight = service, 0
        self._routes: dict[str, dict[str, Route]] = {}
        for route in ROUTES:
            self._routes.setdefault(route.path, {})[route.method] = route
        self._key = f"Bearer {service.api_key}".encode()
        self._openapi = encode(openapi.document(service.version, bool(service.api_key))).encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One connection's event, as ASGI has it."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._answer(exchange)
        except ClientGone:
            pass
        except ApiError as error:
            await self._refuse(exchange, error)
        except Exception as error:
            log.exception("%s %s", exchange.method, exchange.path)
            await self._refuse(exchange, ApiError(500, f"{type(error).__name__} in the server; its log says more"))
        finally:
            exchange.finish()

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path == "/openapi.json" and exchange.method == "GET":
            await exchange.reply(200, self._openapi)
            return
        route = self._route(exchange)
        if route.guarded:
            self._check_key(exchange)
        if route.accepts is None:
            await self._reply(exchange, await route.handler(self.service, None, exchange))
            return
        if self.in_flight >= self.service.limits.requests:
            raise busy(429, f"expected at most {self.service.limits.requests} requests at once")
        self.in_flight += 1
        try:
            asked = await self._read(exchange, route)
            self.service.check(asked.model)
            await self._reply(exchange, await route.handler(self.service, asked, exchange))
        finally:
            self.in_flight -= 1

    def _route(self, exchange: Exchange) -> Route:
        methods = self._routes.get(exchange.path)
        if methods is None:
            raise ApiError(404, f"no such path: {exchange.path}", code="not_found")
        if exchange.method not in methods:
            allowed = ", ".join(methods)
            raise ApiError(405, f"{exchange.path}: expected {allowed}", headers=(("allow", allowed),))
        return methods[exchange.method]

    def _check_key(self, exchange: Exchange) -> None:
        if not self.service.api_key:
            return
        shown = exchange.header(b"authorization").encode("latin-1")
        if not hmac.compare_digest(shown, self._key):
            raise ApiError(
                401, "expected the header Authorization: Bearer KEY", headers=(("www-authenticate", "Bearer"),)
            )

    async def _read(self, exchange: Exchange, route: Route) -> Any:
        """The request's body, checked."""
        kind = exchange.header(b"content-type").partition(";")[0].strip().lower()
        if kind != JSON:
            raise ApiError(415, f"expected the header Content-Type: {JSON}, found {kind or 'none'}")
        body = await exchange.body(self.service.limits.body_bytes)
        assert route.accepts is not None
        try:
            return route.accepts.validate_json(body)
        except ValidationError as error:
            raise unusable(error) from None

    async def _reply(self, exchange: Exchange, reply: Reply) -> None:
        if isinstance(reply, bytes):
            await exchange.reply(200, reply, PAGE)
        elif isinstance(reply, AsyncIterator):
            await self._stream(exchange, reply)
        else:
            await exchange.reply(200, encode(reply).encode())

    async def _stream(self, exchange: Exchange, events: AsyncIterator[bytes]) -> None:
        """Nothing is sent before the first event is there: until then an error has a status of its own."""
        try:
            first = await anext(events)
            await exchange.begin_stream()
            await exchange.more(first)
            async for each in events:
                await exchange.more(each)
            await exchange.more(DONE, last=True)
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        """An error as a status, or where a stream is under way as its last event."""
        if exchange.started:
            await exchange.more(event(error.document()) + DONE, last=True)
        else:
            await exchange.reply(error.status, encode(error.document()).encode(), headers=error.headers)
