"""A live server as a client sees it: connections, the settings that it publishes, and streams of completions."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from workloads.errors import BadInput

SECONDS = 600.0
"""Seconds without a byte after which a connection is given up."""


def key_headers() -> dict[str, str]:
    """The header with the key in OPENAI_API_KEY; none without one."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class Upstream:
    """The place of a server: `https` or `http`, host, port, and a path before `/v1`."""

    secure: bool
    host: str
    port: int
    path: str = ""

    @classmethod
    def of(cls, url: str, flag: str) -> Upstream:
        expected = "expected a URL such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            raise BadInput(expected, field=flag, value=url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise BadInput(expected, field=flag, value=url)
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(secure, parts.hostname, port or (443 if secure else 80), path)

    def connect(self, seconds: float = SECONDS) -> http.client.HTTPConnection:
        """A new connection, not open yet."""
        if self.secure:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=seconds, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=seconds)

    def get(self, path: str, headers: dict[str, str], seconds: float = 10.0) -> str:
        """The text of a page."""
        connection = self.connect(seconds)
        try:
            connection.request("GET", self.path + path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        except http.client.HTTPException as error:
            raise OSError(f"no HTTP response ({type(error).__name__})") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        return text


def model_cards(server: Upstream, headers: dict[str, str], flag: str) -> list[dict[str, Any]]:
    """What `/v1/models` says of each model that a server offers; `id` is its name."""
    try:
        cards = json.loads(server.get("/v1/models", headers))["data"]
        return [{**card, "id": str(card["id"])} for card in cards]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"expected a server that answers /v1/models: {error}", field=flag,
                       value=f"{server.host}:{server.port}") from None  # fmt: skip


def published_settings(server: Upstream, headers: dict[str, str]) -> dict[str, Any]:
    """Cache settings in a server's metrics (vLLM's `cache_config_info`), by vLLM's names; empty without them."""
    try:
        return cache_settings(server.get("/metrics", headers))
    except OSError:
        return {}


WANTED = ("block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization")


def cache_settings(metrics: str) -> dict[str, Any]:
    """The settings in the labels of `cache_config_info`, in Prometheus' text format."""
    match = re.search(r"^vllm:cache_config_info\{([^}]*)\}", metrics, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', match[1])) if match else {}
    values = {name: _value(labels[name]) for name in WANTED if name in labels}
    return {name: value for name, value in values.items() if value is not None}


def _value(text: str) -> bool | int | float | None:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return None


class CompletionStream:
    """A stream of server-sent events from `/v1/completions` or `/v1/chat/completions`.

    `first`, `last`: when chunks with a token came, on the clock of `feed`; `chunks`: their number. `usage`: the
    server's counts of tokens. `hide_usage`: do not pass on the last chunk, which has these and no choices.
    """

    def __init__(self, *, hide_usage: bool = False) -> None:
        self._hide = hide_usage
        self._rest = b""
        self.first: float | None = None
        self.last: float | None = None
        self.chunks = 0
        self.usage: dict[str, Any] = {}
        self.error = ""

    def feed(self, data: bytes, now: float) -> bytes:
        """Read bytes that came at `now`, seconds; returns the bytes to pass on, whole events only."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return b"".join(event + b"\n\n" for event in events if self._read(event, now))

    def end(self) -> bytes:
        """Bytes that were no whole event."""
        remainder = self._rest
        self._rest = b""
        return remainder

    def _read(self, event: bytes, now: float) -> bool:
        for line in event.split(b"\n"):
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            try:
                document = json.loads(line[5:])
            except ValueError:
                continue
            if not isinstance(document, dict):
                continue
            if "error" in document:
                self.error = str(document["error"])[:200]
            choices, usage = document.get("choices"), document.get("usage")
            if isinstance(usage, dict):
                self.usage = usage
            if choices:
                if any(map(_has_token, choices)):
                    self.first = now if self.first is None else self.first
                    self.last = now
                    self.chunks = self.chunks + 1
            elif usage is not None and self._hide:
                return False
        return True

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None where the server did not count them."""
        return self._count("prompt_tokens")

    @property
    def output_tokens(self) -> int | None:
        """Tokens of the answer, by the server's count; the number of chunks without one; None if there were none."""
        return self._count("completion_tokens") or self.chunks or None

    def _count(self, name: str) -> int | None:
        value = self.usage.get(name)
        return value if isinstance(value, int) and value >= 0 else None


def _has_token(choice: Any) -> bool:
    """True for a choice with a token, which may have no text of its own, such as a part of a character."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return "text" in choice
    parts = {name: value for name, value in delta.items() if name != "role"}
    return any(parts.values()) or ("role" not in delta and "content" in delta)
