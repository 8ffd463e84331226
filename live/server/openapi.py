"""The OpenAPI 3.1 document, generated from the operations and the types of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from live.server.replies import ErrorReply

ERRORS = {
    "400": "An invalid request; `param` is the field.",
    "401": "No API key, or a wrong one.",
    "404": "An unknown model.",
    "408": "A body that does not arrive in time.",
    "413": "A body that is too large.",
    "415": "A body that is not JSON.",
    "429": "Too many concurrent requests.",
    "500": "An internal error.",
    "503": "The queue is full, the server is shutting down, or the engine has failed.",
}
OF_GET = ("401", "500", "503")
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""One event of a stream: JSON of the same kind as the whole response, or [DONE] at the end."""


@dataclass(frozen=True)
class Operation:
    """One endpoint.

    Attributes:
        handler: called with the service, the body and the headers; its docstring is the operation's summary.
        response: type of the response, None for a page of text. body: type of the request's body, None for GET.
        requires_key: clients must send the API key. streams: the response may be server-sent events.
    """

    path: str
    handler: Callable[..., Any]
    response: TypeAdapter[Any] | None
    body: TypeAdapter[Any] | None = None
    requires_key: bool = True
    streams: bool = False

    @property
    def method(self) -> str:
        """GET without a body, else POST."""
        return "GET" if self.body is None else "POST"


def document(operations: Sequence[Operation], version: str, secured: bool) -> dict[str, Any]:
    """The document. `secured`: the server requires an API key."""
    adapters: list[Any] = [("error", "serialization", TypeAdapter(ErrorReply))]
    for i, operation in enumerate(operations):
        if operation.body is not None:
            adapters.append((i, "validation", operation.body))
        if operation.response is not None:
            adapters.append((i, "serialization", operation.response))
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for i, operation in enumerate(operations):
        body, response = schemas.get((i, "validation")), schemas.get((i, "serialization"))
        entry = _entry(operation, body, response, schemas["error", "serialization"])
        if secured and operation.requires_key:
            entry["security"] = [{"key": []}]
        paths[operation.path] = {operation.method.lower(): entry}
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {})}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "serving-twin", "version": version, "summary": "OpenAI-compatible serving of one model"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _entry(operation: Operation, body: Any, response: Any, error: Any) -> dict[str, Any]:
    page: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    content = page if response is None else _json(response)
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    statuses = OF_GET if body is None else ERRORS
    errors = {status: {"description": ERRORS[status], "content": _json(error)} for status in statuses}
    summary = (operation.handler.__doc__ or "").strip()
    entry: dict[str, Any] = {
        "operationId": f"{operation.method.lower()}{operation.path.replace('/', '_')}",
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **errors},
    }
    if body is not None:
        entry["requestBody"] = {"required": True, "content": _json(body)}
    return entry


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
