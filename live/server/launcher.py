"""The operations of the API, a server of them on a socket, and its shutdown; the workers of a topology behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeAlias

import uvicorn
from pydantic import TypeAdapter
from starlette.types import ASGIApp

from live.backend import Backend
from live.device import freeze_loaded_objects
from live.server import endpoints, protocol, replies
from live.server.app import STOPPED, App
from live.server.completions import create_chat_completion, create_completion
from live.server.connection import ConnectionConfig, cut_off
from live.server.input_processor import ChatTemplate
from live.server.loading import refuse
from live.server.options import ServerConfig, ServerOptions, TopologyOptions, flag
from live.server.protocol import Operation
from live.server.replies import busy
from live.server.service import Service
from live.tokenizer import Tokenizer
from live.topologies.deployment import Deployment
from live.topologies.local import InProcessWorkers
from live.topologies.membership import Address
from live.topologies.processes import (
    TimeLimits,
    TopologyBackend,
    WorkerProcesses,
    gathered,
    run_worker,
    visible_gpus,
)
from live.topologies.transport import TransportError
from workloads.errors import BadInput

log = logging.getLogger("live.server")

CUT_OFF_SECONDS = 1.0
"""Seconds in which clients that are cut off can still be told so."""


def _post(paths: str, handler: Any, body: Any, response: Any, *, streams: bool = False) -> list[Operation]:
    adapters = TypeAdapter(response), TypeAdapter(body)
    return [Operation(path, handler, *adapters, streams=streams) for path in paths.split()]


OPERATIONS: tuple[Operation, ...] = (
    Operation("/health", endpoints.health, TypeAdapter(replies.Status), requires_key=False),
    Operation("/ping", endpoints.health, TypeAdapter(replies.Status), requires_key=False),
    Operation("/version", endpoints.version, TypeAdapter(replies.Version), requires_key=False),
    Operation("/metrics", endpoints.metrics, None, requires_key=False),
    Operation("/v1/models", endpoints.models, TypeAdapter(replies.Models)),
    *_post("/v1/completions", create_completion, protocol.CompletionRequest, replies.Completion, streams=True),
    *_post("/v1/chat/completions", create_chat_completion, protocol.ChatRequest, replies.Chat, streams=True),
    *_post("/v1/embeddings", endpoints.embeddings, protocol.EmbeddingRequest, replies.Embeddings),
    *_post("/pooling", endpoints.pooling, protocol.EmbeddingRequest, replies.Pooling),
    *_post("/classify", endpoints.classify, protocol.ClassifyRequest, replies.Classes),
    *_post("/score /v1/score", endpoints.score, protocol.ScoreRequest, replies.Scores),
    *_post("/rerank /v1/rerank", endpoints.rerank, protocol.RerankRequest, replies.Ranking),
    *_post("/tokenize", endpoints.tokenize, protocol.TokenizeText | protocol.TokenizeChat, replies.Tokens),
    *_post("/detokenize", endpoints.detokenize, protocol.DetokenizeRequest, replies.Prompt),
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
    app: ASGIApp, listener: socket.socket, options: ServerOptions
) -> tuple[uvicorn.Server, asyncio.Task[None]]:
    """Start an ASGI application on a socket; returns the server, and a task that ends when the server does."""
    server = _Server(ConnectionConfig(app, options))
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
    server, serving = await start_server(app, listener, config.options)
    shutdown = GracefulShutdown(app, server, config.options.drain_seconds)
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
    listener = listen(config.options.host, config.options.port)
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


MAX_SECONDS = 86400.0
"""Maximum of time limits."""


Serve: TypeAlias = Callable[[TopologyBackend], int]
"""Serves a backend over HTTP until a shutdown; returns the exit code."""


def serve_topology(deployment: Deployment, words: list[str], options: TopologyOptions, serve: Serve) -> int:
    """Serve with a topology, or be one of its workers; returns the exit code. `words`: the flags of a worker."""
    for name in ("join_seconds", "worker_seconds"):
        if not 0 < (value := getattr(options, name)) <= MAX_SECONDS:
            raise BadInput(f"expected a number above 0, of at most {MAX_SECONDS:g}", field=flag(name), value=value)
    names, limits = deployment.names, TimeLimits(options.join_seconds, options.worker_seconds)
    if options.in_process:
        refuse(options, "role rendezvous", "expected none beside --in-process")
        with closing(TopologyBackend(deployment, InProcessWorkers(deployment))) as backend:
            return serve(backend)
    rank = 0 if options.role is None else _rank(options, names)
    address = Address("127.0.0.1", 0) if options.rendezvous is None else Address.parse(options.rendezvous)
    try:
        if rank:
            if options.rendezvous is None:
                raise BadInput("expected it beside --role, where the coordinator or frontend is", field="--rendezvous")
            run_worker(deployment, rank, address, limits)
            return 0
        return _serve_front(deployment, address, words if options.role is None else None, limits, serve)
    except TransportError as error:
        print(f"serve-live: {error}", file=sys.stderr, flush=True)
        return 1


def _serve_front(
    deployment: Deployment, address: Address, words: list[str] | None, limits: TimeLimits, serve: Serve
) -> int:
    """Start the workers of this machine, wait for all, and serve.

    `words`: None if the workers are started by themselves.
    """
    names = deployment.names
    places = {rank: names[rank].split() for rank in range(1, len(names))}

    def commands(meeting_point: Address) -> dict[int, list[str]]:
        command = [sys.executable, "-m", "live.server", *(words or []), "--rendezvous", str(meeting_point)]
        return {rank: [*command, "--role", role, "--rank", number] for rank, (role, number) in places.items()}

    starts = words is not None
    gpus = visible_gpus(places) if starts and deployment.device != "cpu" else {}
    with gathered(deployment, address, limits, gpus, commands if starts else None) as (members, workers):
        members.ready()
        with closing(TopologyBackend(deployment, WorkerProcesses(deployment, members, workers, limits))) as backend:
            return serve(backend)


def _rank(options: TopologyOptions, names: list[str]) -> int:
    roles = list(dict.fromkeys(name.split()[0] for name in names))
    if options.role not in roles:
        raise BadInput(f"expected {', '.join(roles)}", field="--role", value=options.role)
    ranks = [i for i, name in enumerate(names) if name.split()[0] == options.role]
    if not 0 <= options.rank < len(ranks):
        raise BadInput(f"expected 0 to {len(ranks) - 1}, of {options.role}", field="--rank", value=options.rank)
    return ranks[options.rank]
