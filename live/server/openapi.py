"""The OpenAPI 3.1 document, generated from the operations and the types of their bodies, and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from live.server.replies import ErrorReply
from workloads.errors import TwinError

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""The HTTP statuses that this server sends, with the `type` of their errors."""

INVALID = "invalid_body"
"""The `code` of a body that the OpenAPI document forbids. Other 400 errors break a rule that a schema cannot
express.
"""


class ApiError(TwinError):
    """An error that ends a request.

    Attributes:
        status: HTTP status, a key of `ERROR_TYPES`. param: the field at fault. code: for programs. headers: sent with
            it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def document(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        error = {"message": self.message, "type": ERROR_TYPES[self.status], "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 error about a field."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def busy(status: int, message: str, retry_after: float = 1.0) -> ApiError:
    """An error for an overloaded or stopping server, with a Retry-After of whole seconds, rounded up."""
    seconds = str(max(math.ceil(retry_after), 1))
    return ApiError(status, message, code="overloaded", headers=(("retry-after", seconds),))


def invalid_body(error: ValidationError) -> ApiError:
    """A 400 error about the first invalid field; for a field of several possible types, with the problem of each."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    for problem in problems:
        place = problem["loc"]
        if place and str(place[0])[:1].isupper():  # the name of one of several models in a union
            problem["loc"] = place[1:]
    first = problems[0]["loc"]
    if not first:
        return ApiError(400, f"expected a JSON object: {problems[0]['msg']}", code=INVALID)
    name = str(first[0])
    messages = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][:1] == first[:1])
    inner = [str(part) for part in first[1:]] if len(messages) == 1 else []
    return ApiError(400, f"{'.'.join([name, *inner])}: {'; '.join(list(messages)[:4])}", param=name, code=INVALID)


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
