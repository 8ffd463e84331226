"""Ids and dates of responses."""

from __future__ import annotations

import secrets
import time


def response_id(kind: str) -> str:
    """A new id of a response, such as "cmpl-" and 32 hexadecimal digits."""
    return f"{kind}-{secrets.token_hex(16)}"


def unix_time() -> int:
    """Seconds since 1970."""
    return int(time.time())
