"""What goes wrong with a request, as its client is told."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from workloads.errors import TwinError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""HTTP statuses that this server answers with, and the `type` of their errors."""

INVALID = "invalid_body"
"""The `code` of a body that is not what the OpenAPI document says; others break a rule that no schema can tell."""


class ApiError(TwinError):
    """A request that ends with an error.

    Attributes:
        status: of HTTP, one of `KINDS`. param: the field at fault. code: a word for programs.
        headers: that go with it.
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
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def document(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        error = {"message": self.message, "type": KINDS[self.status], "param": self.param, "code": self.code}
        return {"error": error}


class ClientGone(Exception):
    """The client has closed its connection."""


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 about a field."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def busy(status: int, message: str) -> ApiError:
    """Not now: the client may try again in a second."""
    return ApiError(status, message, code="overloaded", headers=(("retry-after", "1"),))


def unusable(error: ValidationError) -> ApiError:
    """A 400 about the first field that cannot be used; of a field that may be several things, what each expected."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    for problem in problems:
        if str(problem["loc"][0] if problem["loc"] else "")[:1].isupper():  # a model of several that a body may be
            problem["loc"] = problem["loc"][1:]
    first = problems[0]["loc"]
    if not first:
        return ApiError(400, f"expected a JSON object: {problems[0]['msg']}", code=INVALID)
    name = str(first[0])
    said = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][:1] == first[:1])
    inner = [str(part) for part in first[1:]] if len(said) == 1 else []
    return ApiError(400, f"{'.'.join([name, *inner])}: {'; '.join(list(said)[:4])}", param=name, code=INVALID)
