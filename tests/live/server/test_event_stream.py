"""Events are written where tokens are delivered: joined for clients that do not read, and streams take turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from live.engine import Progress
from live.generation import make_generation
from live.server import service as service_module
from live.server.app import EventStream
from live.server.options import ServerConfig
from live.server.request_state import RequestState, Response
from live.server.service import MIN_WRITES, Service


class Texts(Response):
    """A response whose events are what has been put into `pending`."""

    stream = True

    def __init__(self) -> None:
        self.states = [RequestState(make_generation(0, [1], 8), asyncio.Event())]
        self.pending: list[bytes] = []

    def document(self) -> dict[str, Any]:
        raise AssertionError("it is a stream")

    def events(self) -> bytes:
        events = b"".join(self.pending)
        self.pending.clear()
        if b"wrong" in events:
            raise ValueError("no such text")
        return events


class Wire:
    """In place of a `Connection`."""

    def __init__(self) -> None:
        self.flow = SimpleNamespace(write_paused=False)
        self.on_writable: Any = None
        self.chunks: list[bytes] = []

    def write_chunk(self, body: bytes) -> None:
        self.chunks.append(body)


def opened() -> tuple[Texts, Wire, EventStream]:
    response, wire = Texts(), Wire()
    stream = EventStream(response, wire)  # type: ignore[arg-type]
    stream.open()
    return response, wire, stream


def test_a_client_that_does_not_read_gets_all_at_once_later() -> None:
    response, wire, _ = opened()
    write = response.states[0].on_tokens
    assert write is not None
    for text in (b"a", b"b", b"c", b"d"):
        wire.flow.write_paused = text in (b"b", b"c")
        response.pending.append(text)
        if text == b"d":
            wire.on_writable()
            assert response.states[0].changed.is_set()
        write()
    assert wire.chunks == [b"a", b"bcd"]


def test_an_error_belongs_to_its_stream() -> None:
    """Delivery to the other streams goes on."""
    response, wire, stream = opened()
    response.pending.append(b"wrong")
    stream.write()
    assert isinstance(stream.error, ValueError)
    assert response.states[0].changed.is_set()
    stream.close()
    assert response.states[0].on_tokens is wire.on_writable is None


def test_many_streams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between deliveries that take no time, only the least number is written: the longest waiting."""
    monkeypatch.setattr(service_module.time, "perf_counter", lambda: 1.0)
    model = SimpleNamespace(shape=SimpleNamespace(vocabulary=10), labels=(), end_tokens=())
    limits = SimpleNamespace(max_model_len=100)
    service = Service(ServerConfig("m"), SimpleNamespace(config=model, limits=limits, models=(), start=lambda *_: None))  # type: ignore[arg-type]
    written: list[int] = []
    states = [RequestState(make_generation(i, [1], 8), asyncio.Event()) for i in range(3 * MIN_WRITES)]
    for i, state in enumerate(states):
        state.on_tokens = lambda i=i: written.append(i)
        service.request_states[i] = state
    generations = [state.generation for state in states]
    for turn in range(1, 7):
        for generation in generations:
            generation.output.append(5)
        finished = generations[:1] if turn == 6 else []
        service._deliver(Progress(generations, finished))
        assert len(written) == turn * MIN_WRITES
    assert written == [*range(3 * MIN_WRITES), *range(2 * MIN_WRITES), *range(2 * MIN_WRITES, 3 * MIN_WRITES)]
    assert all(state.changed.is_set() for state in states), "the first token wakes the task that begins the stream"


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    from benchmarks.streaming import main

    main(["--streams", "3", "--tokens", "100", "--out", str(tmp_path / "out.json")])
    document = json.loads((tmp_path / "out.json").read_text())
    assert 0 < document["seconds_per_token"] < 1e-3
