"""Streamed completions of a server on this machine, as its client sees them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

from workloads.errors import TwinError

HOST = "127.0.0.1"


def completion_events(port: int, body: Mapping[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """The events of an answer to `/v1/completions` as they come.

    `TwinError` without one within `timeout` seconds, for an error among them, and if the answer breaks off.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise TwinError(f"the server answers with status {reply.status}: {reply.read().decode()[:200]}")
        for line in reply:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                event = json.loads(text.removeprefix("data: "))
                if "error" in event:
                    raise TwinError(f"the server answers with an error: {event['error']}")
                yield event
        raise TwinError("the server's answer breaks off")
    except (OSError, http.client.HTTPException) as error:
        raise TwinError(f"the server has not answered: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
