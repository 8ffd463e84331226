"""The operations of the API, and a server of them on a socket, which is shut down with an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from pydantic import TypeAdapter
from starlette.types import ASGIApp

from live.backend import Backend
from live.memory import freeze_loaded_objects
from live.server import protocol, replies
from live.server.app import STOPPED, App
from live.server.completions import create_chat_completion, create_completion
from live.server.connection import ConnectionConfig, cut_off
from live.server.endpoints import detokenize, health, metrics, models, tokenize, version
from live.server.openapi import Operation
from live.server.options import Limits, ServerConfig
from live.server.pooling import classify, embeddings, pooling, rerank, score
from live.server.replies import busy
from live.server.service import Service
from live.text.chat import ChatTemplate
from live.text.tokenizer import Tokenizer
from workloads.errors import BadInput

log = logging.getLogger("live.server")

CUT_OFF_SECONDS = 1.0
"""Seconds in which clients that are cut off can still be told so."""


def _post(paths: str, handler: Any, body: Any, response: Any, *, streams: bool = False) -> list[Operation]:
    adapters = TypeAdapter(response), TypeAdapter(body)
    return [Operation(path, handler, *adapters, streams=streams) for path in paths.split()]


OPERATIONS: tuple[Operation, ...] = (
    Operation("/health", health, TypeAdapter(replies.Status), requires_key=False),
    Operation("/ping", health, TypeAdapter(replies.Status), requires_key=False),
    Operation("/version", version, TypeAdapter(replies.Version), requires_key=False),
    Operation("/metrics", metrics, None, requires_key=False),
    Operation("/v1/models", models, TypeAdapter(replies.Models)),
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


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would stop accepting connections at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve on; port 0 takes a free one."""
    if not host:  # to the system this would be every address of the machine
        raise BadInput(
            "expected an address to listen on; 0.0.0.0 for all of this machine's", field="--host", value=host
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only for this: 40 ms less
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"expected an address to listen on ({reason})", field="--host, --port", value=f"{host}:{port}"
        ) from None
    return listener


async def start_server(
    app: ASGIApp, listener: socket.socket, limits: Limits
) -> tuple[uvicorn.Server, asyncio.Task[None]]:
    """Start an ASGI application on a socket; returns the server, and a task that ends when the server does."""
    server = _Server(ConnectionConfig(app, limits))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    return server, serving


async def serve(
    backend: Backend,
    config: ServerConfig,
    listener: socket.socket,
    *,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    ready: Callable[[Service, GracefulShutdown], None] = lambda service, shutdown: None,
    signals: bool = True,
    ends_on_failure: bool = False,
) -> int:
    """Serve until a shutdown; returns 0 if all requests were answered, 1 if some were cut off.

    Args:
        listener: from `listen`. ready: called when requests are accepted.
        signals: SIGTERM and SIGINT begin a graceful shutdown; a second signal ends it at once.
        ends_on_failure: end when the backend fails; otherwise go on, and answer every request with the error.
    """
    service = Service(config, backend, tokenizer, template)
    app = App(service, OPERATIONS)
    server, serving = await start_server(app, listener, config.limits)
    shutdown = GracefulShutdown(app, server, config.drain_seconds)
    if signals:
        shutdown.listen()
    if ends_on_failure:
        service.on_failure = shutdown.fail
    ready(service, shutdown)
    try:
        await serving
    finally:
        app.threads.shutdown(wait=False, cancel_futures=True)
    return shutdown.code


class GracefulShutdown:
    """The shutdown of a server: running requests finish, new ones are refused, then the connections close.

    Attributes:
        code: the exit code: 0 unless requests were cut off.
    """

    def __init__(self, app: App, server: uvicorn.Server, seconds: float) -> None:
        self.app = app
        self.server = server
        self.seconds = seconds
        self.code = 0
        self._hurry = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Handle SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Begin the shutdown; a second call ends it at once."""
        if self._draining is None:
            self.app.service.draining = True
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._hurry.set()

    def fail(self, reason: str) -> None:
        """End because the backend has failed; its requests have got their errors already."""
        log.error("%s", reason)
        self.code = 1
        if self._draining is None:
            self.stop()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.seconds
        while self.app.in_flight and not self._hurry.is_set() and loop.time() < end:
            await asyncio.sleep(0.02)
        if self.app.in_flight:
            self.code = 1
            self.app.service.fail_all(busy(503, STOPPED))
            end = loop.time() + CUT_OFF_SECONDS
            while self.app.in_flight and loop.time() < end:
                await asyncio.sleep(0.02)
        cut_off(self.server)  # also clients that do not read, or do not send their bodies
        self.server.should_exit = True


def run(
    backend: Backend,
    config: ServerConfig,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    *,
    ends_on_failure: bool = False,
) -> int:
    """Serve until a shutdown, and print one line when requests are accepted. Arguments and result as of `serve`."""
    listener = listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host

    def ready(service: Service, shutdown: GracefulShutdown) -> None:
        settings = backend.limits
        text = "" if tokenizer is not None else "; token ids only"
        print(
            f"http://{address}:{port} serves {config.name}: {settings.num_gpu_blocks} blocks of "
            f"{settings.block_size} tokens, contexts of up to {service.inputs.max_model_len}{text}",
            flush=True,
        )

    freeze_loaded_objects()
    logging.basicConfig(format="live.server: %(message)s", level=logging.WARNING, stream=sys.stderr)
    return asyncio.run(
        serve(
            backend, config, listener, tokenizer=tokenizer, template=template, ready=ready,
            ends_on_failure=ends_on_failure,
        )
    )  # fmt: skip
