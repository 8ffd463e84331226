"""The state of one output of a request with its text, and the response that reads it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from live.generation import Generation
from live.server.replies import ApiError, FinishReason
from live.tokenizer import Tokenizer


class StopStrings:
    """The stop strings of a request with their search tables, shared by all outputs.

    Tables take time and memory proportional to the strings' length. Each output has its own `StopSearch`.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.tables = [(text, _borders(text)) for text in dict.fromkeys(texts)]
        self.first_characters = frozenset(text[0] for text, _ in self.tables)

    def search(self) -> StopSearch:
        """A new search, through one output."""
        return StopSearch(self)


class StopSearch:
    """The search for stop strings in one output: the first complete one, and of two that end together the longer.

    `pending`: characters at the end of the text so far that may begin a stop string.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.tables)
        self.pending = 0

    def feed(self, piece: str, counts: bool = True) -> tuple[int, str] | None:
        """Search the next part of the text, until a string is found: the end in `piece`, and the string.

        Without `counts`, a string complete within `piece` is ignored; one that begins in it may count later.
        """
        if not self.pending and self._stops.first_characters.isdisjoint(piece):
            return None
        ends = []
        for i, (text, borders) in enumerate(self._stops.tables):
            end, self._matched[i] = _search(text, borders, self._matched[i], piece, counts)
            if end is not None:
                ends.append((end, -len(text), text))
        if not ends:
            self.pending = max(self._matched)
            return None
        end, _, text = min(ends)
        return end, text


def _search(stop: str, borders: list[int], matched: int, piece: str, counts: bool) -> tuple[int | None, int]:
    """Knuth, Morris and Pratt's search, which reads each character once; `matched`: characters that precede `piece`.

    Returns the end of the string in `piece`, None if it is incomplete or does not count, and the characters matched.
    """
    place = 0
    while place < len(piece):
        if not matched:
            place = piece.find(stop[0], place)
            if place < 0:
                break
        while matched and stop[matched] != piece[place]:
            matched = borders[matched - 1]
        matched += stop[matched] == piece[place]
        place += 1
        if matched == len(stop):
            if counts:
                return place, matched
            matched = borders[-1]
    return None, matched


def _borders(text: str) -> list[int]:
    """The length of the longest shorter prefix that each prefix ends with."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[length] != text[i]:
            length = borders[length - 1]
        length += text[length] == text[i]
        borders[i] = length
    return borders


class TextStream:
    """Converts tokens to text that is never taken back, at the same cost for each token of an output.

    Three things are held back: an incomplete character, a run of byte tokens whose end decides its text
    (`live.tokenizer`), and what may be the beginning of a stop string. All text together equals
    `Tokenizer.decode`, up to the first stop string that ends after `min_tokens`; then `stopped` is that string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: StopStrings | None = None, *, min_tokens: int = 0,
        include_stop_str_in_output: bool = False, skip_special_tokens: bool = True,
    ) -> None:  # fmt: skip
        self.stopped: str | None = None
        self._detokenizer = tokenizer.detokenizer()
        self._skipped = tokenizer.special if skip_special_tokens else frozenset()
        self._stops = None if stops is None else stops.search()
        self._include_stop = include_stop_str_in_output
        self._ignored = min_tokens  # tokens to come until a stop string may end the text
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain after this token; often none."""
        self._ignored -= 1
        if self.stopped is not None or token in self._skipped:
            return ""
        return self._certain(self._detokenizer.push(token))

    def finish(self) -> str:
        """The text held back, once there are no more tokens."""
        if self.stopped is not None:
            return ""
        text = self._certain(self._detokenizer.finish()) + self._held
        self._held = ""
        return text

    def _certain(self, piece: str) -> str:
        """The text that is certain: all but a possible beginning of a stop string, or all before a stop string."""
        if self._stops is None or not piece:
            return piece
        text = self._held + piece
        match = self._stops.feed(piece, self._ignored <= 0)
        if match is None:
            cut = len(text) - self._stops.pending
        else:
            end, self.stopped = match
            cut = len(text) - len(piece) + end - (0 if self._include_stop else len(self.stopped))
        self._held = "" if match else text[cut:]
        return text[:cut]


class OutputDelta(NamedTuple):
    """The new part of an output: its text, the indices of its tokens, and whether it is the last part."""

    text: str
    begin: int
    end: int
    last: bool


@dataclass(eq=False, slots=True)
class RequestState:
    """One output of a request, as the event loop sees it.

    Attributes:
        generation: belongs to the engine while it runs. changed: set with its first token, and when it ends.
        on_tokens: writes new tokens, unless they are the last; None: they are read at the end.
        index: of the choice in the response. stop_token_ids: as the request gives them.
        stream: decodes the output; None without a tokenizer, and then there is no text.
        finished: no more tokens will come. error: what went wrong.
        first_token_time, last_token_time: seconds of `time.perf_counter`, -1 until they are known.
        num_recorded, num_read: output tokens that the metrics have counted, and that the response has read.
        ended: the response has read the last part.
    """

    generation: Generation
    changed: asyncio.Event
    index: int = 0
    stop_token_ids: Sequence[int] = ()
    stream: TextStream | None = None
    finished: bool = False
    error: ApiError | None = None
    first_token_time: float = -1.0
    last_token_time: float = -1.0
    num_recorded: int = 0
    num_read: int = 0
    ended: bool = False
    on_tokens: Callable[[], None] | None = None
    _text: str = ""
    _num_decoded: int = 0

    @property
    def has_delta(self) -> bool:
        """True if there is something to read."""
        return len(self.generation.output) > self.num_read or (self.finished and not self.ended)

    def stops_at(self, token: int) -> bool:
        """Decode the next token; returns whether a stop string ends the text there."""
        assert self.stream is not None
        self._text += self.stream.push(token)
        self._num_decoded += 1
        return self.stream.stopped is not None

    def read(self) -> OutputDelta:
        """Everything since the last call."""
        output, last = self.generation.output, self.finished
        text = ""
        if self.stream is not None:
            for token in output[self._num_decoded :]:
                self.stops_at(token)
            text = self._text + (self.stream.finish() if last else "")
            self._text = ""
        delta = OutputDelta(text, self.num_read, len(output), last)
        self.num_read = len(output)
        self.ended = last
        return delta

    @property
    def finish(self) -> tuple[FinishReason, str | int | None]:
        """The reason why a finished output ended, and the stop string or token of `stop_token_ids` that ended it."""
        if self.stream is not None and self.stream.stopped is not None:
            return "stop", self.stream.stopped
        if self.generation.finish_reason != "stop" or not self.generation.output:
            return "length", None
        token = self.generation.output[-1]
        return "stop", token if token in self.stop_token_ids else None


class Response(ABC):
    """The response to a request with generations.

    Attributes:
        states: one for each generation. stream: the response is sent in parts, while its generations run.
    """

    states: list[RequestState]
    stream = False

    @abstractmethod
    def document(self) -> Mapping[str, Any]:
        """The whole response, when all generations are finished."""

    def events(self) -> bytes:
        """The new parts of a stream, as server-sent events."""
        return b""

    def last_events(self) -> bytes:
        """The parts of a stream that follow the last output."""
        return b""
