"""The stream of a completion, read as it passes: when its tokens came, and how many."""

from __future__ import annotations

import json
from typing import Any


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
