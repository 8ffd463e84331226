"""The OpenAPI 3.1 document, made of the route table and the models that requests are checked by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import TypeAdapter

from live.server.exchange import JSON
from live.server.replies import ErrorReply
from live.server.routes import ROUTES, Route

ERRORS = {
    "400": "A request that cannot be served; `param` is the field.",
    "401": "No key, or a wrong one.",
    "404": "Another model's name.",
    "413": "A body that is too large.",
    "415": "A body that is not JSON.",
    "429": "Too many requests at once.",
    "500": "A fault of the server's own.",
    "503": "The queue is full, the server is shutting down, or the engine has failed.",
}
OF_GET = ("401", "500", "503")
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""Of a stream: JSON of the same kind as the whole answer, or the word [DONE] at the end."""

PLACE = "#/components/schemas/{model}"

Adapters = list[tuple[Any, Literal["validation", "serialization"], TypeAdapter[Any]]]


def document(version: str, secured: bool) -> dict[str, Any]:
    """The document. `secured`: the server wants a key."""
    error = TypeAdapter(ErrorReply)
    adapters: Adapters = [("error", "serialization", error)]
    for i, route in enumerate(ROUTES):
        if route.accepts is not None:
            adapters.append((i, "validation", route.accepts))
        if route.gives is not None:
            adapters.append(((i, "reply"), "serialization", route.gives))
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template=PLACE)
    paths: dict[str, Any] = {}
    for i, route in enumerate(ROUTES):
        body = schemas.get((i, "validation"))
        reply = schemas.get(((i, "reply"), "serialization"))
        operation = _operation(route, body, reply, schemas["error", "serialization"])
        if secured and route.guarded:
            operation["security"] = [{"key": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {})}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "serving-twin", "version": version, "summary": "OpenAI-compatible serving of one model"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: Route, body: Any, reply: Any, error: Any) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}} if reply is None else {JSON: {"schema": reply}}
    if route.streams:
        content["text/event-stream"] = {"schema": EVENT}
    statuses = ERRORS if route.method == "POST" else OF_GET
    said = {status: {"description": ERRORS[status], "content": {JSON: {"schema": error}}} for status in statuses}
    summary = (route.handler.__doc__ or "").strip()
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{route.path.replace('/', '_')}",
        "summary": summary,
        "responses": {"200": {"description": summary, "content": content}, **said},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return operation
