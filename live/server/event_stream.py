"""Streams of server-sent events, written to their connections by the step that made their tokens.

A task for each stream sends its first event and its end. To wake it for each token would take the event loop several
times as long as the event itself, so the events between are written where tokens are delivered
(`live.server.service`), which limits the time that this takes. A stream that waits for its turn, or for a client that
does not read, gets all that has come by then as one event.
"""

from __future__ import annotations

import asyncio
from json import JSONEncoder

from live.server.connection import Connection
from live.server.request_state import Response

DONE = b"data: [DONE]\n\n"
"""The end of every stream."""

encode = JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""A document as JSON text. The encoder is made once: `json.dumps` makes one in each call with these options."""


def to_bytes(document: object) -> bytes:
    """A document as UTF-8. Lone surrogates, which an error message may quote, become question marks."""
    return encode(document).encode(errors="replace")


def event(document: object) -> bytes:
    """A document as a server-sent event."""
    return b"data: %b\n\n" % to_bytes(document)


class EventStream:
    """The events of one response on its connection.

    The task that runs the response sends the first events. From `open` on, new ones are written where tokens are
    delivered, and `changed` is set when there is something left for the task to do.

    Attributes:
        error: what went wrong in a delivery; the task is to end the stream with it.
    """

    def __init__(self, response: Response, connection: Connection) -> None:
        self._response = response
        self._connection = connection
        self._changed: asyncio.Event = response.states[0].changed
        self.error: Exception | None = None

    def open(self) -> None:
        """Write from now on; the response has begun, and its first events have been sent."""
        self._connection.on_writable = self._resume
        for state in self._response.states:
            state.on_tokens = self.write

    def close(self) -> None:
        """Write no longer."""
        self._connection.on_writable = None
        for state in self._response.states:
            state.on_tokens = None

    def write(self) -> None:
        """Write all new events, unless the client does not read."""
        connection = self._connection
        if connection.flow.write_paused:
            return
        try:
            if events := self._response.events():
                connection.write_chunk(events)
        except Exception as error:  # of one stream, which must not stop the step that delivers to all
            self.error = error
            self._changed.set()

    def _resume(self) -> None:
        """Write what has come while the client did not read, and let the task see whether this was the last."""
        self.write()
        self._changed.set()
