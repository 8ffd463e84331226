"""The OpenAPI 3.1 document, generated from the route table and the request models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import TypeAdapter

from live.server.asgi import JSON
from live.server.replies import ErrorReply
from live.server.routes import ROUTES, Route

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

PLACE = "#/components/schemas/{model}"

Adapters = list[tuple[Any, Literal["validation", "serialization"], TypeAdapter[Any]]]


def document(version: str, secured: bool) -> dict[str, Any]:
    """The document. `secured`: the server requires an API key."""
    error = TypeAdapter(ErrorReply)
    adapters: Adapters = [("error", "serialization", error)]
    for i, route in enumerate(ROUTES):
        if route.body is not None:
            adapters.append((i, "validation", route.body))
        if route.response is not None:
            adapters.append(((i, "reply"), "serialization", route.response))
    schemas, definitions = TypeAdapter.json_schemas(adapters, ref_template=PLACE)
    paths: dict[str, Any] = {}
    for i, route in enumerate(ROUTES):
        body = schemas.get((i, "validation"))
        reply = schemas.get(((i, "reply"), "serialization"))
        operation = _operation(route, body, reply, schemas["error", "serialization"])
        if secured and route.requires_key:
            operation["security"] = [{"key": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    components: dict[str, Any] = {"schemas": definitions.get("$defs", {})}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "serving-twin", "version": version, "summary": "OpenAI-compatible serving of one model"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: Route, body: Any, reply: Any, error: Any) -> dict[str, Any]:
    content: dict[str, Any] = (
        {"text/plain": {"schema": {"type": "string"}}} if reply is None else {JSON: {"schema": reply}}
    )
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
