"""What clients are sent. Typed dictionaries: a document is written as it is, and the OpenAPI page is made of them."""

from __future__ import annotations

from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic wants these of Python 3.11
)

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]


class Usage(TypedDict):
    """Tokens of a request and of its answers together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    """One entry for each token; `text_offset` counts characters from the beginning of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One answer, or a piece of it. `stop_reason`: the stop string or token that ended it, if one was asked for."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class Alternative(TypedDict):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Alternative):
    """A token that came, and the likeliest in its place."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenLogprob]
    refusal: None


class Message(TypedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class Chat(TypedDict):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]
    prompt_token_ids: NotRequired[list[int]]


class PromptUsage(TypedDict):
    """Tokens of a request that is answered without any."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """One vector; base64 is of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(TypedDict):
    """The answer of /v1/embeddings: vectors of length 1."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PromptUsage


class Pooled(TypedDict):
    """What a prompt comes to."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class Pooling(TypedDict):
    """The answer of /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: PromptUsage


class Score(TypedDict):
    """One pair's."""

    index: int
    object: Literal["score"]
    score: float


class Scores(TypedDict):
    """The answer of /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class RankedText(TypedDict):
    """A document as it was sent."""

    text: str


class Ranked(TypedDict):
    """A document's place."""

    index: int
    document: RankedText
    relevance_score: float


class Ranking(TypedDict):
    """The answer of /rerank, the most relevant first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[Ranked]


class Class(TypedDict):
    """One input's likeliest label, and the probability of each."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classes(TypedDict):
    """The answer of /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: PromptUsage


class Tokens(TypedDict):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(TypedDict):
    """The answer of /detokenize."""

    prompt: str


class Model(TypedDict):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(TypedDict):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Status(TypedDict):
    """The answer of /health and /ping."""

    status: Literal["ok"]


class Version(TypedDict):
    """The answer of /version."""

    version: str


class Error(TypedDict):
    """What went wrong: `param` is the field at fault, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """Any error's answer, in OpenAI's shape."""

    error: Error
