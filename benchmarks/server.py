"""Time that the HTTP server adds to the engine's time to the first token: streaming chat, one client, loopback.

    python -m benchmarks.server [--requests 500] [--out FILE]

The client is a process of its own that writes a request and reads until the first content. The engine's
part is the time from its `submit` to its first token. The rest is what the server adds, with the loopback and the
client. Every request has another text, so that no prompt is found in the cache.

In turns with the server, the same requests go to a bare application on the same uvicorn and the same engine, which
looks at nothing but the prompt's number and answers with a constant: what it adds is the floor of this way of serving
on this machine. Exit code 4 when the median of what the server adds is above 0.3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from starlette.types import Message, Receive, Send

from benchmarks.provenance import provenance
from kernels.shapes import Shape
from live.backend import EngineBackend
from live.engine import Engine
from live.generation import Generation, make_generation
from live.input_batch import generation_of
from live.models.config import ModelConfig
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.server.input_processor import ChatTemplate
from live.server.launcher import GracefulShutdown, listen, serve, start_server
from live.server.options import ServerConfig, ServerOptions
from live.server.service import Service
from live.tokenizer import Tokenizer
from schedulers.engine_config import EngineConfig, OneShotBudget

LIMIT = 0.3e-3
TOKENS = 8
"""Tokens of each answer. The client waits for the first."""

DIGITS = 6
"""Digits at the start of each prompt, with the number of the request."""

BARE = 1 << 20
"""First number of the bare application's requests."""

PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
LAST_PIECE = PIECE.replace(b"null", b'"length"') + b"data: [DONE]\n\n"

SHAPE = Shape(2, 64, 128, 4, 2, 16, 512)
"""A small model, so that differences between steps do not hide what the server adds."""

WARM = 30
"""Pairs that are not counted."""

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"


def write_text_layer(directory: Path) -> None:
    """A tokenizer of single bytes, and a chat template."""
    from tokenizers import Tokenizer as Making
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    making = Making(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    making.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    making.decoder = decoders.ByteLevel()
    making.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def messages(number: int) -> list[dict[str, str]]:
    """A chat of about 64 tokens that begins with the number of the request."""
    return [{"role": "user", "content": f"{number:0{DIGITS}d} tell me a story about a machine"}]


def body(number: int) -> bytes:
    """The body of a request."""
    fields = {"messages": messages(number), "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    return json.dumps({"model": "tiny", **fields}).encode()


class Bare:
    """The least that an ASGI application can do around an engine: the floor that the server is measured against."""

    def __init__(self, engine: Engine, prompt: int) -> None:
        self.engine = engine
        self.prompt = prompt

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request with a constant piece for each token. Its prompt is its number, and zeros."""
        number = int(json.loads((await receive())["body"])["messages"][0]["content"][:DIGITS])
        digits = [ord(digit) for digit in f"{number:0{DIGITS}d}"]
        self.engine.submit(make_generation(BARE + number, digits + [0] * (self.prompt - DIGITS), TOKENS))
        for i in range(TOKENS):
            await asyncio.sleep(0)
            self.engine.step()
            if i == 0:
                head = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": head})
            last = i == TOKENS - 1
            await send({"type": "http.response.body", "body": LAST_PIECE if last else PIECE, "more_body": not last})


def over_http(connection: socket.socket, number: int) -> float:
    """Send a request; returns the seconds to the first content."""
    sent = body(number)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent
    start, first, received = time.perf_counter(), -1.0, b""
    connection.sendall(request)
    while not received.endswith(b"0\r\n\r\n"):
        received += connection.recv(65536)
        if first < 0 and b'"delta":{"content"' in received:
            first = time.perf_counter() - start
    assert received.count(b'"finish_reason":"length"') == 1, received
    return first


def client(ports: list[int], orders: Connection) -> None:
    """The client process: sends each request whose number it gets, to the ports in turns, until it gets None."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for port in ports]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (number := orders.recv()) is not None:
            orders.send([over_http(connection, number) for connection in connections])


@dataclass(frozen=True)
class Times:
    """Seconds to the first token of the same requests: as the client saw it, and the engine's part of that."""

    client: list[float]
    engine: list[float]

    @property
    def added(self) -> list[float]:
        """The part that the server adds."""
        return [outside - inside for outside, inside in zip(self.client, self.engine, strict=True)]


def measure(requests: int) -> tuple[Times, Times, dict[str, Any]]:
    """Times of the server and of the bare application, and a description of the runs."""
    torch.set_num_threads(1)
    engine = _engine()
    prefilled: list[Generation] = []
    engine.watch = lambda batch, begin, end: prefilled.extend(generation_of(chunk.sequence) for chunk in batch.chunks)
    client_times: list[list[float]] = []
    doors = listen("127.0.0.1", 0), listen("127.0.0.1", 0)
    context = multiprocessing.get_context("spawn")
    ours, far_end = context.Pipe()
    process = context.Process(target=client, args=([door.getsockname()[1] for door in doors], far_end))
    process.start()
    far_end.close()

    def one_by_one(stop: Callable[[], object]) -> None:
        try:
            for i in range(WARM + requests):
                ours.send(i)
                client_times.append(ours.recv())
            ours.send(None)
        finally:
            stop()

    def ready(service: Service, stopping: GracefulShutdown) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=one_by_one, args=(lambda: loop.call_soon_threadsafe(stopping.stop),)).start()

    async def both(tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        assert template is not None
        prompt = len(tokenizer.encode(template.render(messages(0)), special=False))
        bare, running = await start_server(Bare(engine, prompt), doors[1], ServerOptions())
        await serve(
            EngineBackend(engine),
            ServerConfig("tiny"),
            doors[0],
            tokenizer=tokenizer,
            template=template,
            ready=ready,
            signals=False,
        )
        bare.should_exit = True
        await running

    with tempfile.TemporaryDirectory() as folder:
        write_text_layer(Path(folder))
        tokenizer = Tokenizer(Path(folder))
        asyncio.run(both(tokenizer, ChatTemplate.read(Path(folder))))
    process.join()
    assert len(prefilled) == 2 * len(client_times), "each prompt is one chunk"
    inside = [door.first_token - door.submitted for door in prefilled]
    server, bare = (Times([pair[i] for pair in client_times[WARM:]], inside[i::2][WARM:]) for i in (0, 1))
    return server, bare, {"fast_tokenizer": tokenizer.fast}


def _engine() -> Engine:
    config = ModelConfig("llama", SHAPE, max_position_embeddings=4096, tied=False)
    decoder = Decoder(config, random_weights(config, torch.float32, "cpu"))
    return Engine(decoder, EngineConfig(num_gpu_blocks=4096, one_shot=OneShotBudget()))


def summary(times: list[float]) -> dict[str, float]:
    """Quantiles of the times, seconds."""
    quantiles = statistics.quantiles(times, n=100)
    return {"p10": quantiles[9], "p50": quantiles[49], "p90": quantiles[89]}


def main() -> int:
    """Measure and print; exit code 4 if the limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="at least 100")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args()
    if options.requests < 100:
        parser.error(f"--requests: expected at least 100, found {options.requests}")
    server, bare, client_result = measure(options.requests)
    rows = {
        "engine": summary(server.engine),
        "client": summary(server.client),
        "added": summary(server.added),
        "added by a bare application": summary(bare.added),
    }
    print(f"{'time to first token, ms':<28}     p10     p50     p90")
    for name, row in rows.items():
        print(f"{name:<28}" + "".join(f"{1e3 * value:8.3f}" for value in row.values()))
    if options.out:
        document = {
            **provenance("twin.benchmark-server/3"),
            "torch": str(torch.__version__),
            "requests": options.requests,
            **client_result,
            "seconds": rows,
            "limit": LIMIT,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if rows["added"]["p50"] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
