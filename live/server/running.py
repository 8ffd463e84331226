"""From a socket to an exit code: the server's life."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from live.engine import Engine
from live.memory import keep_what_is_loaded
from live.server.app import App
from live.server.errors import busy
from live.server.exchange import Application
from live.server.metrics import Tally
from live.server.service import Limits, Service
from live.server.worker import Worker
from live.text.chat import ChatTemplate
from live.text.tokenizer import Tokenizer
from workloads.errors import BadInput

LAST_WORDS = 1.0
"""Seconds in which clients that are cut off are told so."""


@dataclass(frozen=True)
class Front:
    """What a server shows.

    Attributes:
        name: the model's, to clients. drain_seconds: that requests under way have when the server is told to stop.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would close its doors at the first one, and new requests would not be answered."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve on; port 0 takes a free one.

    Raises:
        BadInput: an address that is not ours, or a port that somebody has.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY where this is said: 40 ms less
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"expected an address to listen on ({reason})", field="--host, --port", value=f"{host}:{port}"
        ) from None
    return made


async def open_doors(app: Application, made: socket.socket) -> tuple[uvicorn.Server, asyncio.Task[None]]:
    """An ASGI application that takes requests from a socket, and its task, which ends when the server does."""
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", loop="asyncio", access_log=False, log_level="warning",
        log_config=None, server_header=False, date_header=False, proxy_headers=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[made]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    return server, serving


async def serve(
    engine: Engine,
    front: Front,
    made: socket.socket,
    *,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    ready: Callable[[Service, Stopping], None] = lambda service, stopping: None,
    signals: bool = True,
) -> int:
    """Serve until told to stop; 0 if everybody was answered, 1 if somebody was cut off.

    Args:
        made: from `listen`. ready: called when requests are taken. signals: SIGTERM and SIGINT tell it to stop, and a
            second one to do so at once.
    """
    tally = Tally()
    worker = Worker(engine, tally, asyncio.get_running_loop())
    service = Service(
        front.name, engine, worker, tally, tokenizer, template, limits=front.limits, api_key=front.api_key
    )
    app = App(service)
    server, serving = await open_doors(app, made)
    stopping = Stopping(app, server, front.drain_seconds)
    if signals:
        stopping.listen()
    ready(service, stopping)
    await serving
    return stopping.code


class Stopping:
    """How a server ends: first it finishes what it has begun, and refuses what is new; then its doors close.

    Attributes:
        code: the exit code: 0 unless somebody was cut off.
    """

    def __init__(self, app: App, server: uvicorn.Server, seconds: float) -> None:
        self.app, self.server, self.seconds, self.code = app, server, seconds, 0
        self._hurry = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Take SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Stop, and when told again, at once."""
        if self._draining is None:
            self.app.service.draining = True
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._hurry.set()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.seconds
        while self.app.in_flight and not self._hurry.is_set() and loop.time() < end:
            await asyncio.sleep(0.02)
        if self.app.in_flight:
            self.code = 1
            self.app.service.worker.fail_all(busy(503, "the server has stopped before the answer was whole"))
            end = loop.time() + LAST_WORDS
            while self.app.in_flight and loop.time() < end:
                await asyncio.sleep(0.02)
        self.server.should_exit = True


def run(engine: Engine, front: Front, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> int:
    """Serve until told to stop; prints one line when requests are taken. Returns as `serve`.

    Raises:
        BadInput: an address that cannot be listened on.
    """
    made = listen(front.host, front.port)
    host, port = made.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def ready(service: Service, stopping: Stopping) -> None:
        config = engine.core.config
        text = "" if tokenizer is not None else "; token ids only"
        print(
            f"http://{shown}:{port} serves {service.name}: {config.kv_blocks} blocks of {config.block_tokens} tokens, "
            f"contexts of up to {service.contexts}{text}",
            flush=True,
        )

    keep_what_is_loaded()
    logging.basicConfig(format="live.server: %(message)s", level=logging.WARNING, stream=sys.stderr)
    return asyncio.run(serve(engine, front, made, tokenizer=tokenizer, template=template, ready=ready))
