"""The state of one generation in the server: its times, its end, and the text of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from live.generation import Generation
from live.server.errors import ApiError
from live.text.stream import TextStream

FinishedReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""The end of a generation, by the names of the metrics."""


class RequestState:
    """The event loop's view of one generation.

    Attributes:
        generation: belongs to the engine while it runs. finished: no more tokens will come. error: what went wrong.
        arrival_time, first_token_time, last_token_time: seconds of `time.perf_counter`, -1 until they are known.
        num_recorded: output tokens that the metrics have counted.
        notify: wakes the response that waits for this generation.
    """

    __slots__ = (
        "arrival_time", "error", "finished", "first_token_time", "generation", "last_token_time", "notify",
        "num_recorded",
    )  # fmt: skip

    def __init__(self, generation: Generation, arrival_time: float, notify: Callable[[], None]) -> None:
        self.generation, self.arrival_time, self.notify = generation, arrival_time, notify
        self.finished = False
        self.error: ApiError | None = None
        self.first_token_time = self.last_token_time = -1.0
        self.num_recorded = 0


class OutputText:
    """The text of an output, decoded once for both the engine's stop check and the response.

    Args:
        stream: decodes the tokens; None without a tokenizer, and then there is no text.
    """

    def __init__(self, stream: TextStream | None) -> None:
        self._stream, self._num_decoded, self._text = stream, 0, ""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._stream is None else self._stream.stopped

    def add(self, token: int) -> bool:
        """Decode the next token; returns whether the text ends with it."""
        assert self._stream is not None
        self._text += self._stream.push(token)
        self._num_decoded += 1
        return self._stream.stopped is not None

    def take(self, output: list[int], last: bool) -> str:
        """The text of all tokens so far that is certain and has not been taken. `last`: no more tokens will come."""
        if self._stream is None:
            return ""
        for token in output[self._num_decoded :]:
            self.add(token)
        taken = self._text + (self._stream.finish() if last else "")
        self._text = ""
        return taken
