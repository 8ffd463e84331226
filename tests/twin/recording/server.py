"""A server that answers completions with as many tokens as requested, a few milliseconds each."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

METRICS = (
    'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",gpu_memory_utilization="0.9",'
    'num_gpu_blocks="1234",sliding_window="None"} 1.0\n'
)

PAGES = {"/metrics": METRICS, "/v1/models": {"data": [{"id": "small"}]}}


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)  # type: ignore[attr-defined]
        page = page() if callable(page) else page
        body = page if isinstance(page, str) else json.dumps(page)
        self._whole(404 if page is None else 200, body.encode())

    def do_POST(self) -> None:
        if not self.server.completes:  # type: ignore[attr-defined]
            self._whole(501, b"")
            return
        document = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, document, dict(self.headers)))  # type: ignore[attr-defined]
        if "refuse" in str(document.get("prompt")):
            self._whole(400, b'{"error": {"message": "refused"}}')
        elif not document.get("stream"):
            self._whole(200, b'{"choices": [{"text": "whole"}]}')
        else:
            self._stream(document)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, document: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        prompt = document.get("prompt") or "chat"
        if self.path.startswith("/v1/chat"):
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        time.sleep(0.02)
        for i in range(document["max_tokens"]):
            text = f"{i} "
            chat = self.path.startswith("/v1/chat")
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text, "index": 0}]})
            time.sleep(0.004)
        if (document.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(prompt), "completion_tokens": document["max_tokens"]}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, document: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[int]:
    """A server in a thread; yields its port."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@contextlib.contextmanager
def answering(
    pages: Mapping[str, Any] = MappingProxyType(PAGES), *, completes: bool = True
) -> Iterator[tuple[int, list[Any]]]:
    """A server of these pages, by path (texts, documents, or what makes them), that completes requests or does not.

    Yields its port, and a list of the requests that it gets.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    server.__dict__.update(pages=pages, completes=completes, seen=[])
    with serving(server) as port:
        yield port, server.__dict__["seen"]
