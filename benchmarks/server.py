"""What the HTTP server adds to the engine's time to the first token: streaming chat, one client, over the loopback.

    python -m benchmarks.server [--repeat 400] [--rounds 5] [--out FILE]

The client is a process of its own that writes a request and reads until the first content. The engine is then called
directly, on its own thread, with the tokens of the same messages. Rounds of both alternate in one run; every request
has another text, so that no prompt is found in the cache. Exit code 4 when the median difference is above 0.3 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.scheduling_decision import machine
from kernels.sampling import Wish
from live.engine import Engine
from live.generation import ask
from live.models.config import ModelConfig, read_config
from live.models.decoder import Decoder
from live.models.weights import random_weights
from live.server.running import Front, Stopping, listen, serve
from live.server.service import Service
from live.text.chat import ChatTemplate
from live.text.tokenizer import Tokenizer
from schedulers.engine_config import EngineConfig, OneShotBudget
from twin.cli.manifest import manifest

LIMIT = 0.3e-3
TOKENS = 8
"""Of each answer: enough for a stream, and the first of them is what is waited for."""

MODEL = Path(__file__).resolve().parents[1] / "examples" / "models" / "tiny-llama.json"
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
    """About 64 tokens, of which the first say which request it is."""
    return [{"role": "user", "content": f"{number:06d} tell me a story about a machine"}]


def body(number: int) -> bytes:
    """The request."""
    fields = {"messages": messages(number), "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    return json.dumps({"model": "tiny", **fields}).encode()


def over_http(port: int, numbers: range) -> list[float]:
    """Seconds to the first content of each request, on one connection that is kept."""
    times = []
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in numbers:
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
            times.append(first)
    return times


def client(port: int, orders: Connection) -> None:
    """A process: measures what it is told to, until it is told nothing."""
    while (numbers := orders.recv()) is not None:
        orders.send(over_http(port, numbers))


def direct(service: Service, numbers: range) -> list[float]:
    """Seconds to the first token of the same requests, on the engine's thread with nobody else there."""
    words, template = service.words, service.template
    assert template is not None
    prompts = [words.encode(template.render(messages(number)), special=False) for number in numbers]
    times: list[float] = []
    done = threading.Event()

    def measure() -> None:
        for number, prompt in zip(numbers, prompts, strict=True):
            start = time.perf_counter()
            generation = ask(-1 - number, prompt, TOKENS, wish=Wish(temperature=0.0))
            service.engine.submit(generation)
            while not generation.output:
                service.engine.step()
            times.append(time.perf_counter() - start)
            while service.engine.step() is not None:
                pass
        done.set()

    service.worker.inbox.put(measure)
    done.wait()
    return times


def measure(repeat: int, rounds: int) -> tuple[list[float], list[float], dict[str, Any]]:
    """Times of both, and what was run."""
    torch.set_num_threads(1)
    config = read_config(MODEL)
    engine = _engine(config)
    made = listen("127.0.0.1", 0)
    port = made.getsockname()[1]
    found: dict[str, list[float]] = {"server": [], "engine": []}
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=client, args=(port, theirs))
    process.start()
    theirs.close()

    def rounds_of_both(service: Service, stop: Any) -> None:
        try:
            for i in range(-1, rounds):  # the first warms up
                numbers = range((2 * i + 2) * repeat, (2 * i + 3) * repeat)
                ours.send(numbers)
                over, straight = ours.recv(), direct(service, range(numbers.stop, numbers.stop + repeat))
                if i >= 0:
                    found["server"] += over
                    found["engine"] += straight
            ours.send(None)
        finally:
            stop()

    def ready(service: Service, stopping: Stopping) -> None:
        loop = asyncio.get_running_loop()
        stop = lambda: loop.call_soon_threadsafe(stopping.stop)  # noqa: E731
        threading.Thread(target=rounds_of_both, args=(service, stop)).start()

    with tempfile.TemporaryDirectory() as folder:
        write_text_layer(Path(folder))
        text = Tokenizer(Path(folder)), ChatTemplate.read(Path(folder))
        asyncio.run(serve(engine, Front("tiny"), made, tokenizer=text[0], template=text[1], ready=ready, signals=False))
    process.join()
    return found["server"], found["engine"], {"model": MODEL.name, "fast_tokenizer": text[0].fast}


def _engine(config: ModelConfig) -> Engine:
    decoder = Decoder(config, random_weights(config, torch.float32, "cpu"))
    return Engine(decoder, EngineConfig(kv_blocks=4096, one_shot=OneShotBudget()))


def summary(times: list[float]) -> dict[str, float]:
    """Seconds."""
    quantiles = statistics.quantiles(times, n=100)
    return {"p10": quantiles[9], "p50": quantiles[49], "p90": quantiles[89]}


def main() -> int:
    """Measure, print, and say whether the limit was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=200, help="requests a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the document to this file")
    asked = parser.parse_args()
    server, engine, told = measure(asked.repeat, asked.rounds)
    rows = {"engine": summary(engine), "server": summary(server)}
    added = {name: rows["server"][name] - rows["engine"][name] for name in rows["server"]}
    print("time to first token, ms    p10     p50     p90")
    for name, row in (*rows.items(), ("added", added)):
        print(f"{name:<22}" + "".join(f"{1e3 * value:8.3f}" for value in row.values()))
    if asked.out:
        run = manifest({})
        document = {
            "schema": "twin.benchmark-server/1",
            "date": datetime.now(UTC).date().isoformat(),
            **{name: run[name] for name in ("version", "commit", "python")},
            "torch": str(torch.__version__),
            "machine": machine(),
            "requests": asked.repeat * asked.rounds,
            **told,
            "seconds": {**rows, "added": added},
            "limit": LIMIT,
        }
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    return 4 if added["p50"] > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
