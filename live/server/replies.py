"""Response bodies as typed dictionaries, of which the OpenAPI document is generated; errors as clients see them."""

from __future__ import annotations

import math
from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic needs typing_extensions' TypedDict before Python 3.12
)

from pydantic import ValidationError
from typing_extensions import TypedDict

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


FinishReason = Literal["stop", "length"]


class Usage(TypedDict):
    """Token counts of a request and all of its outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptUsage(TypedDict):
    """Token counts of a pooling request."""

    prompt_tokens: int
    total_tokens: int


class Listing(TypedDict):
    """The common fields of responses with a list; the list is `data`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PromptUsage


class CompletionLogprobs(TypedDict):
    """One entry for each token; `text_offset` counts characters from the beginning of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One output, or a part of it. `stop_reason`: the stop string or stop token that ended it, if the request gave
    it.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """The response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Alternative(TypedDict):
    """A possible token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """An output token, with the most likely tokens in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenLogprob]
    refusal: None


class Message(TypedDict):
    """The model's message."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """One output."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class Chat(TypedDict):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    prompt_token_ids: NotRequired[list[int]]


class Embedding(TypedDict):
    """One vector; with base64, of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(Listing):
    """The response of /v1/embeddings: vectors of length 1."""

    data: list[Embedding]


class Pooled(TypedDict):
    """The pooled output of one prompt."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class Pooling(Listing):
    """The response of /pooling."""

    data: list[Pooled]


class Score(TypedDict):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class Scores(Listing):
    """The response of /score."""

    data: list[Score]


class RankedText(TypedDict):
    """A document as it was sent."""

    text: str


class Ranked(TypedDict):
    """A document with its relevance."""

    index: int
    document: RankedText
    relevance_score: float


class Ranking(TypedDict):
    """The response of /rerank, the most relevant document first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[Ranked]


class Class(TypedDict):
    """The most likely label of one input, with the probability of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(Listing):
    """The response of /classify."""

    data: list[Class]


class Tokens(TypedDict):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(TypedDict):
    """The response of /detokenize."""

    prompt: str


class Model(TypedDict):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(TypedDict):
    """The response of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Status(TypedDict):
    """The response of /health and /ping."""

    status: Literal["ok"]


class Version(TypedDict):
    """The response of /version."""

    version: str


class Error(TypedDict):
    """An error: `param` is the field at fault, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """The response of any request that fails, in OpenAI's form."""

    error: Error
