"""Which path is whose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from live.server import protocol, replies
from live.server.chat import chat
from live.server.completions import complete
from live.server.exchange import Exchange
from live.server.pooling import classify, embeddings, pooling, rerank, score
from live.server.service import Service
from live.server.status import health, metrics, models, version
from live.server.tokens import detokenize, tokenize

Reply: TypeAlias = Mapping[str, Any] | AsyncIterator[bytes] | bytes
"""A document, the events of a stream, or a page of text."""

Handler: TypeAlias = Callable[[Service, Any, Exchange], Awaitable[Any]]


@dataclass(frozen=True)
class Route:
    """One endpoint.

    Attributes:
        gives, accepts: bodies of answers and requests; an answer without one is a page of text.
        guarded: it wants the key. streams: it may answer with server-sent events.
    """

    method: str
    path: str
    handler: Handler
    gives: TypeAdapter[Any] | None
    accepts: TypeAdapter[Any] | None = None
    guarded: bool = True
    streams: bool = False


def _get(path: str, handler: Handler, gives: Any, *, guarded: bool = False) -> Route:
    return Route("GET", path, handler, None if gives is None else TypeAdapter(gives), guarded=guarded)


def _post(paths: str, handler: Handler, accepts: Any, gives: Any, *, streams: bool = False) -> list[Route]:
    body, reply = TypeAdapter(accepts), TypeAdapter(gives)
    return [Route("POST", path, handler, reply, body, streams=streams) for path in paths.split()]


ROUTES: tuple[Route, ...] = (
    _get("/health", health, replies.Status),
    _get("/ping", health, replies.Status),
    _get("/version", version, replies.Version),
    _get("/metrics", metrics, None),
    _get("/v1/models", models, replies.Models, guarded=True),
    *_post("/v1/completions", complete, protocol.CompletionRequest, replies.Completion, streams=True),
    *_post("/v1/chat/completions", chat, protocol.ChatRequest, replies.Chat, streams=True),
    *_post("/v1/embeddings", embeddings, protocol.EmbeddingRequest, replies.Embeddings),
    *_post("/pooling", pooling, protocol.EmbeddingRequest, replies.Pooling),
    *_post("/classify", classify, protocol.ClassifyRequest, replies.Classes),
    *_post("/score /v1/score", score, protocol.ScoreRequest, replies.Scores),
    *_post("/rerank /v1/rerank", rerank, protocol.RerankRequest, replies.Ranking),
    *_post("/tokenize", tokenize, protocol.TokenizeText | protocol.TokenizeChat, replies.Tokens),
    *_post("/detokenize", detokenize, protocol.DetokenizeRequest, replies.Prompt),
)
