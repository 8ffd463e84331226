"""CPU time of a streamed token in the thread that steps the engine, from its step to the socket.

    python -m benchmarks.streaming [--streams 256] [--tokens 200] [--out FILE]

The engine computes nothing: every sequence gets the same token in every step. Clients are a process of their own that
reads /v1/completions with `stream`. Steps that decode for all streams are counted, from the first such step on, by the
processor time of the server's thread. Exit code 4: above 10 µs a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import threading
import time
from functools import cache
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.host_step import Instant
from benchmarks.provenance import provenance
from live.backend import EngineBackend
from live.engine import Engine, Progress
from live.graphs.executor import GraphExecutor
from live.graphs.step import StaticStep
from live.server.launcher import GracefulShutdown, listen, serve
from live.server.options import ServerConfig
from live.server.service import Service
from schedulers.engine_config import EngineConfig

LIMIT = 10e-6
MISSED = 4
PROMPT = list(range(1, 40))
WINDOW = 20
"""Steps of one sample, the median of which is the result."""


class CountingEngine(Engine):
    """An engine that notes the thread's CPU time behind every step that decodes for all streams."""

    streams = 0
    step_seconds = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.times: list[float] = []
        self._end = 0.0

    def step(self) -> Progress | None:
        """Run `Engine.step`, and note when it ends if all streams decode."""
        result = super().step()
        self._end = max(self._end + self.step_seconds, time.perf_counter())
        time.sleep(max(self._end - time.perf_counter(), 0.0))
        if result is not None and len(result.advanced) == self.streams and len(result.advanced[-1].output) > 1:
            self.times.append(time.thread_time())
        return result


@cache
def same_tokens(rows: int) -> torch.Tensor:
    """The tokens of a step that computes nothing."""
    return torch.ones(rows, dtype=torch.int64)


def instant_run(step: StaticStep) -> torch.Tensor:
    """In place of `StaticStep.run`: the inputs are copied, and the tokens are always the same."""
    step.runs += 1
    step._buffer.copy_(step._staged[0][0], non_blocking=True)
    return same_tokens(step.shape.decodes + step.shape.chunks)


async def read_stream(port: int, tokens: int) -> None:
    """One client: request a stream, and read it to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    writer.write(head.encode() + b"\r\n\r\n" + text)
    end = b""
    while b"[DONE]" not in end:
        part = await reader.read(1 << 16)
        assert part, "the server ends no stream before its end"
        end = end[-16:] + part
    writer.close()


def read_streams(port: int, streams: int, tokens: int) -> None:
    """All clients, in a process of their own."""

    async def read_all() -> None:
        await asyncio.gather(*(read_stream(port, tokens) for _ in range(streams)))

    asyncio.run(read_all())


def measure(streams: int, tokens: int, step_seconds: float) -> list[float]:
    """CPU seconds a token, one value for each window of steps."""
    config = EngineConfig(num_gpu_blocks=80 * streams, max_num_seqs=streams, max_num_batched_tokens=8192)
    engine = CountingEngine(Instant(), config, make_executor=GraphExecutor, depth=2)
    engine.streams = streams
    engine.step_seconds = step_seconds
    listener = listen("127.0.0.1", 0)
    clients: BaseProcess = get_context("spawn").Process(
        target=read_streams, args=(listener.getsockname()[1], streams, tokens)
    )

    def ready(service: Service, stopping: GracefulShutdown) -> None:
        loop = asyncio.get_running_loop()

        def wait() -> None:
            clients.join()
            loop.call_soon_threadsafe(stopping.stop)

        clients.start()
        threading.Thread(target=wait, daemon=True).start()

    with mock.patch.object(StaticStep, "run", instant_run):
        asyncio.run(serve(EngineBackend(engine), ServerConfig("tiny"), listener, ready=ready, signals=False))
    assert clients.exitcode == 0, "the clients read all streams"
    times = engine.times[WINDOW:]
    return [(b - a) / (WINDOW * streams) for a, b in zip(times, times[WINDOW:], strict=False)][::WINDOW]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="clients at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream, at least 80")
    parser.add_argument("--step", type=float, default=0.0, metavar="SECONDS", help="least duration of a step")
    parser.add_argument("--out", type=Path, help="write the document to this file")
    options = parser.parse_args(arguments)
    if options.tokens < 4 * WINDOW:
        parser.error(f"--tokens: got {options.tokens}, expected at least {4 * WINDOW}")
    torch.set_num_threads(1)
    windows = measure(options.streams, options.tokens, options.step)
    seconds = statistics.median(windows)
    document = provenance("twin.benchmark-streaming/1") | {
        "streams": options.streams, "tokens": options.tokens, "seconds_per_token": seconds,
        "windows": windows, "limit": LIMIT,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{options.streams} streams: {1e6 * seconds:.1f} µs of CPU a token, limit {1e6 * LIMIT:g}")
    return MISSED if seconds > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
