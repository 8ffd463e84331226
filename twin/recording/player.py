"""Recorded requests sent to a live server at their recorded times, and the times of its answers."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twin.recording.run_writer import RunWriter
from twin.recording.upstream import CompletionStream, Upstream
from workloads.trace import Trace

FIRST_ID = 10
"""Ids below are left out of made-up prompts: tokenizers keep their special tokens there or at the end."""


@dataclass(frozen=True)
class Target:
    """The server that gets the requests, and the number of token ids to make prompts of."""

    server: Upstream
    model: str
    headers: dict[str, str]
    vocabulary: int


def prompts(trace: Trace, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Made-up prompts of the trace's lengths, as token ids. Equal prefix ids stand for equal tokens."""
    size = trace.prefix_block_tokens or 1
    token_ids = []
    for row, length in enumerate(trace.prefill_tokens.tolist()):
        ids: list[int] = []
        for block in trace.prefix_blocks[row] if trace.prefix_blocks is not None else ():
            ids += _tokens([seed, 1, int(block) % 2**63], size, vocabulary)
        ids += _tokens([seed, 2, row], max(length, 1) - min(len(ids), max(length, 1)), vocabulary)
        token_ids.append(ids[: max(length, 1)])
    return token_ids


def _tokens(seed: Sequence[int], count: int, vocabulary: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(list(seed)).integers(FIRST_ID, vocabulary, count).tolist()
    return tokens


def play(
    trace: Trace, target: Target, writer: RunWriter, *, speed: float = 1.0, requests: int | None = None,
    advance: Callable[[str], object] = lambda text: None,
) -> float:  # fmt: skip
    """Send the first requests of a trace at their times, `speed` times as fast; none waits for an answer.

    Returns the latest delay of a request, seconds: large where this machine could not keep up.
    """
    assert trace.arrivals is not None
    count = len(trace) if requests is None else requests
    bodies = [
        json.dumps({
            "model": target.model, "prompt": ids, "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True,
            "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
        }).encode()
        for ids, tokens in zip(prompts(trace, target.vocabulary)[:count], trace.decode_tokens.tolist(), strict=False)
    ]  # fmt: skip
    latest = 0.0
    threads = []
    begin = time.monotonic()
    for row, (body, at) in enumerate(zip(bodies, (trace.arrivals / speed).tolist(), strict=False)):
        if (wait := begin + at - time.monotonic()) > 0:
            time.sleep(wait)
        latest = max(latest, time.monotonic() - begin - at)
        thread = threading.Thread(target=_send, args=(row, body, target, writer, advance), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return latest


def _send(row: int, body: bytes, target: Target, writer: RunWriter, advance: Callable[[str], object]) -> None:
    identity, arrival, queued = f"replayed-{row}", time.time(), time.monotonic()
    stream, connection = CompletionStream(), target.server.connect()
    try:
        headers = {"content-type": "application/json", **target.headers}
        connection.request("POST", f"{target.server.path}/v1/completions", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            writer.skip(identity, arrival, f"status {answer.status}: {answer.read(300).decode('utf-8', 'replace')}")
            return
        while data := answer.read1(65536):
            stream.feed(data, time.monotonic())
        writer.add(identity, arrival, queued, stream)
    except (OSError, http.client.HTTPException) as error:
        writer.skip(identity, arrival, f"{type(error).__name__}: {error}")
    finally:
        connection.close()
        advance(identity)
