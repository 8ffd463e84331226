"""A client of few words, for tests that look at what is on the wire."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """Status, headers in lower case, and the body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in a reply."""
        error: dict[str, Any] = self.document["error"]
        return error


class Client:
    """A client of one server. Each call has a connection of its own."""

    def __init__(self, port: int, api_key: str = "") -> None:
        self.port = port
        self.base = f"http://127.0.0.1:{port}"
        self.headers = {"content-type": "application/json"}
        if api_key:
            self.headers["authorization"] = f"Bearer {api_key}"

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        """Any request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, self.headers if headers is None else headers)
            result = connection.getresponse()
            return Answer(result.status, {key.lower(): value for key, value in result.getheaders()}, result.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        """A page."""
        return self.send("GET", path)

    def post(self, path: str, **fields: Any) -> Answer:
        """A JSON body."""
        return self.send("POST", path, json.dumps(fields).encode())

    def post_as(self, tenant: str, service_class: str, path: str, **fields: Any) -> Answer:
        """A JSON body with headers of a tenant and a class."""
        headers = self.headers | {"x-tenant": tenant, "x-request-class": service_class}
        return self.send("POST", path, json.dumps(fields).encode(), headers)

    def events(self, path: str, **fields: Any) -> Iterator[Any]:
        """The documents of a stream, which must end with [DONE]."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("POST", path, json.dumps({**fields, "stream": True}).encode(), self.headers)
            result = connection.getresponse()
            assert result.status == 200, result.read()
            assert result.getheader("content-type", "").startswith("text/event-stream")
            yield from read_events(result)
        finally:
            connection.close()


def read_events(result: http.client.HTTPResponse) -> Iterator[Any]:
    """Documents until [DONE]."""
    for line in result:
        if not line.strip():
            continue
        assert line.startswith(b"data: "), line
        if line.strip() == b"data: [DONE]":
            return
        yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended without [DONE]")
