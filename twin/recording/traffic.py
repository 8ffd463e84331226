"""Requests of a live server: recorded ones sent at their times, and a proxy that writes down when tokens passed."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from twin.recording.run_writer import CompletionStream, RunWriter
from twin.recording.server_pages import Upstream
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


COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY = 64 << 20
HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
"""Headers of one connection, which are not passed on (RFC 9110, 7.6.1)."""


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server and its responses back, byte for byte as they come, a thread a connection.

    Streamed completions are recorded. Unless `untouched`, the server is to count their tokens
    (`stream_options.include_usage`); that chunk is left out if the client has not requested it. `bodies`: file to store
    bodies.
    """

    daemon_threads: ClassVar[bool] = True  # type: ignore[misc]
    request_queue_size: ClassVar[int] = 256  # type: ignore[misc]

    def __init__(
        self, address: tuple[str, int], upstream: Upstream, writer: RunWriter, *, untouched: bool = False,
        bodies: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(address, _Handler)
        self.upstream = upstream
        self.writer = writer
        self.untouched = untouched
        self.bodies = bodies
        self._lock = threading.Lock()
        self._count = 0

    def next_id(self) -> str:
        """A name for a request: observed-0, observed-1, …"""
        with self._lock:
            self._count += 1
            return f"observed-{self._count - 1}"

    def keep_body(self, identity: str, path: str, document: dict[str, Any]) -> None:
        """Write a request's body, if bodies are kept."""
        if self.bodies is not None:
            line = json.dumps({"request_id": identity, "path": path, "body": document}, ensure_ascii=False)
            with self._lock, self.bodies.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that end early; a client may close its connection at any time."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        self._pass()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_PATCH = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""

    def _pass(self) -> None:
        queued, arrival = time.monotonic(), time.time()
        body = self._body()
        if body is None:
            return
        document = self._completion(body)
        streamed = document is not None and document.get("stream") is True
        identity = self.server.next_id() if document is not None else ""
        hidden = False
        if document is not None:
            self.server.keep_body(identity, self.path, document)
            if not streamed:
                self.server.writer.skip(identity, arrival, "not streamed: nothing says when its first token came")
            elif not self.server.untouched and not _counts(document):
                hidden = True
                options = document.get("stream_options")
                options = {**(options if isinstance(options, dict) else {}), "include_usage": True}
                body = json.dumps({**document, "stream_options": options}).encode()
        upstream = self.server.upstream
        connection = upstream.connect()
        try:
            dropped = HOP_BY_HOP | {"host", "content-length"} | ({"accept-encoding"} if streamed else set())
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            connection.request(self.command, upstream.path + self.path, body or None, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            if streamed:
                self.server.writer.skip(identity, arrival, f"the server did not answer: {error}")
            self._refuse(502, f"the server behind the proxy did not answer: {error}")
            connection.close()
            return
        try:
            self._respond(answer, CompletionStream(hide_usage=hidden), identity if streamed else "", arrival, queued)
        finally:
            connection.close()

    def _respond(
        self, answer: http.client.HTTPResponse, stream: CompletionStream, identity: str, arrival: float, queued: float
    ) -> None:
        """Pass a response on as it comes, and record it if it has a name."""
        recorded = bool(identity) and answer.status == 200
        length = answer.getheader("content-length")
        chunked = recorded or (length is None and self.command != "HEAD")
        self.send_response(answer.status, answer.reason)
        for name, value in _passed(answer.getheaders(), chunked=chunked):
            self.send_header(name, value)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        why = "" if answer.status == 200 else f"status {answer.status}"
        try:
            while data := answer.read1(65536):
                self._write(stream.feed(data, time.monotonic()) if recorded else data, chunked)
            if recorded:
                self._write(stream.end(), chunked)
            if chunked:
                self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException) as error:
            why = f"the connection ended early: {type(error).__name__}"
            self.close_connection = True
        if identity and why:
            self.server.writer.skip(identity, arrival, why)
        elif identity:
            self.server.writer.add(identity, arrival, queued, stream)

    def _write(self, data: bytes, chunked: bool) -> None:
        if data:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            self.wfile.flush()

    def _body(self) -> bytes | None:
        """The request's body; None if it was refused."""
        if self.headers.get("transfer-encoding"):
            self._refuse(411, "expected a Content-Length")
            return None
        length = self.headers.get("content-length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY:
            self._refuse(413, f"expected a body of at most {MAX_BODY} bytes")
            return None
        return self.rfile.read(int(length))

    def _completion(self, body: bytes) -> dict[str, Any] | None:
        """The document of a completion; None for other requests."""
        if self.command != "POST" or self.path.partition("?")[0] not in COMPLETIONS:
            return None
        try:
            document = json.loads(body)
        except ValueError:
            return None
        return document if isinstance(document, dict) else None

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": {"message": message, "type": "proxy_error", "code": status}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True


def _counts(document: dict[str, Any]) -> bool:
    """True if the client has requested the server's count of tokens."""
    options = document.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _passed(headers: Iterable[tuple[str, str]], *, chunked: bool) -> list[tuple[str, str]]:
    left_out = HOP_BY_HOP | {"date", "server"} | ({"content-length"} if chunked else set())
    return [(name, value) for name, value in headers if name.lower() not in left_out]
