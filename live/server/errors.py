"""Errors of requests, as clients see them."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

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
