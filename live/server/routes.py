"""The route table: which endpoint answers which path."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from live.server import protocol, replies
from live.server.asgi import HttpExchange
from live.server.chat import create_chat_completion
from live.server.completions import create_completion
from live.server.pooling import classify, embeddings, pooling, rerank, score
from live.server.service import Service
from live.server.status import health, metrics, models, version
from live.server.tokenization import detokenize, tokenize

Reply: TypeAlias = Mapping[str, Any] | AsyncIterator[bytes] | bytes
"""A document, the events of a stream, or a page of text."""

Handler: TypeAlias = Callable[[Service, Any, HttpExchange], Awaitable[Any]]


@dataclass(frozen=True)
class Route:
    """One endpoint.

    Attributes:
        response: type of the response, None for a page of text. body: type of the request's body, None for GET.
        requires_key: clients must send the API key. streams: the response may be server-sent events.
    """

    method: str
    path: str
    handler: Handler
    response: TypeAdapter[Any] | None
    body: TypeAdapter[Any] | None = None
    requires_key: bool = True
    streams: bool = False


def _get(path: str, handler: Handler, response: Any, *, requires_key: bool = False) -> Route:
    return Route("GET", path, handler, None if response is None else TypeAdapter(response), requires_key=requires_key)


def _post(paths: str, handler: Handler, body: Any, response: Any, *, streams: bool = False) -> list[Route]:
    adapters = TypeAdapter(response), TypeAdapter(body)
    return [Route("POST", path, handler, *adapters, streams=streams) for path in paths.split()]


ROUTES: tuple[Route, ...] = (
    _get("/health", health, replies.Status),
    _get("/ping", health, replies.Status),
    _get("/version", version, replies.Version),
    _get("/metrics", metrics, None),
    _get("/v1/models", models, replies.Models, requires_key=True),
    *_post("/v1/completions", create_completion, protocol.CompletionRequest, replies.Completion, streams=True),
    *_post("/v1/chat/completions", create_chat_completion, protocol.ChatRequest, replies.Chat, streams=True),
    *_post("/v1/embeddings", embeddings, protocol.EmbeddingRequest, replies.Embeddings),
    *_post("/pooling", pooling, protocol.EmbeddingRequest, replies.Pooling),
    *_post("/classify", classify, protocol.ClassifyRequest, replies.Classes),
    *_post("/score /v1/score", score, protocol.ScoreRequest, replies.Scores),
    *_post("/rerank /v1/rerank", rerank, protocol.RerankRequest, replies.Ranking),
    *_post("/tokenize", tokenize, protocol.TokenizeText | protocol.TokenizeChat, replies.Tokens),
    *_post("/detokenize", detokenize, protocol.DetokenizeRequest, replies.Prompt),
)
