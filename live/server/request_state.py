"""The three objects of a request: its sampling parameters, the state of each output with its text, and the response."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from kernels import sampling
from live.generation import Generation
from live.server.protocol import GenerationRequest
from live.server.replies import ApiError, FinishReason
from live.tokenizer import Tokenizer
from workloads.errors import BadInput


class StopStrings:
    """The stop strings of a request with their search tables, shared by all outputs; `BadInput` for an empty one.

    Tables take time and memory proportional to the strings' length. Each output has its own `StopSearch`.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise BadInput("expected strings of at least one character", field="stop", value=list(texts))
        self.texts = tuple(dict.fromkeys(texts))
        self.first_characters = frozenset(text[0] for text in self.texts)
        self._tables = tuple((text, _borders(text)) for text in self.texts)

    def search(self) -> StopSearch:
        """A new search, through one output."""
        return StopSearch(self.first_characters, [_Match(text, borders) for text, borders in self._tables])


class StopSearch:
    """The search for stop strings in one output: the first complete one, and of two that end together the longer."""

    def __init__(self, first_characters: frozenset[str], matches: list[_Match]) -> None:
        self._first_characters = first_characters
        self._matches = matches
        self.pending = 0

    def feed(self, piece: str, counts: bool = True) -> tuple[int, str] | None:
        """Search the next part of the text, until a string is found: the end in `piece`, and the string.

        Without `counts`, a string complete within `piece` is ignored; one that begins in it may count later.
        """
        if not self.pending and self._first_characters.isdisjoint(piece):
            return None
        results = [(match.feed(piece, counts), match.text) for match in self._matches]
        ends = [(end, -len(text), text) for end, text in results if end is not None]
        if not ends:
            self.pending = max(match.matched for match in self._matches)
            return None
        end, _, text = min(ends)
        return end, text


class _Match:
    """Knuth, Morris and Pratt's search for one string, which reads each character of the text once."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str, borders: list[int]) -> None:
        self.text = text
        self._borders = borders
        self.matched = 0

    def feed(self, piece: str, counts: bool) -> int | None:
        """The number of characters of `piece` that complete the string; None if it is incomplete or does not count."""
        stop, borders, matched = self.text, self._borders, self.matched
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
                    return place
                matched = borders[-1]
        self.matched = matched
        return None


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


@dataclass(frozen=True)
class SamplingParams(sampling.SamplingParams):
    """The sampling parameters of an output, and the conditions that end it, under vLLM's names.

    Attributes:
        max_tokens: maximum number of output tokens. min_tokens: output tokens before which nothing below ends it.
        stop: stop strings with their search tables, built once for all outputs of a request; None for none.
        stop_token_ids: as the request gives them. all_stop_token_ids: these and the model's own end tokens.
        logprobs, prompt_logprobs: as in `Generation`.
    """

    max_tokens: int = 0
    min_tokens: int = 0
    stop: StopStrings | None = None
    stop_token_ids: frozenset[int] = frozenset()
    all_stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int = -1
    prompt_logprobs: int = -1

    @classmethod
    def of(cls, request: GenerationRequest, max_tokens: int, seed: int, end_tokens: frozenset[int]) -> Self:
        """The parameters of a checked request.

        Args:
            seed: of a request that gives none. end_tokens: the model's own, which a request may ignore.
        """
        stop_token_ids = frozenset(request.stop_token_ids or ())
        return cls(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            seed=seed if request.seed is None else request.seed,
            max_tokens=max_tokens,
            min_tokens=request.min_tokens or 0,
            stop=StopStrings(request.stop_strings) if request.stop_strings else None,
            stop_token_ids=stop_token_ids,
            all_stop_token_ids=stop_token_ids if request.ignore_eos else stop_token_ids | end_tokens,
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            logprobs=request.num_logprobs,
            prompt_logprobs=request.num_prompt_logprobs,
        )

    def of_choice(self, i: int) -> Self:
        """The parameters of the i-th of several outputs, which has a seed of its own."""
        return replace(self, seed=(self.seed + i) & (2**64 - 1))


class TextStream:
    """Converts tokens to text that is never taken back, at the same cost for each token of an output.

    Three things are held back: an incomplete character, a run of byte tokens whose end decides its text
    (`live.tokenizer`), and what may be the beginning of a stop string. All text together equals
    `Tokenizer.decode`, up to the first stop string that ends after `min_tokens`; then `stopped` is that string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams = SamplingParams()) -> None:
        self.stopped: str | None = None
        self._detokenizer = tokenizer.detokenizer()
        self._skipped = tokenizer.special if params.skip_special_tokens else frozenset()
        self._stops = params.stop.search() if params.stop is not None else None
        self._include_stop = params.include_stop_str_in_output
        self._ignored = params.min_tokens  # tokens to come until a stop string may end the text
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
        text = self._certain(self._detokenizer.finish())
        text = text + self._held
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
        index: of the choice in the response. params: None for a pooling request.
        stream: decodes the output; None without a tokenizer, and then there is no text.
        finished: no more tokens will come. error: what went wrong.
        first_token_time, last_token_time: seconds of `time.perf_counter`, -1 until they are known.
        num_recorded, num_read: output tokens that the metrics have counted, and that the response has read.
        ended: the response has read the last part.
    """

    generation: Generation
    changed: asyncio.Event
    index: int = 0
    params: SamplingParams | None = None
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
    def _stop_string(self) -> str | None:
        return None if self.stream is None else self.stream.stopped

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why a finished output ended."""
        generation = self.generation
        ends = self._stop_string is not None or (generation.finish_reason == "stop" and generation.output)
        return "stop" if ends else "length"

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the token of `stop_token_ids` that ended the output."""
        generation = self.generation
        if self._stop_string is not None:
            return self._stop_string
        if self.params is None or generation.finish_reason != "stop" or not generation.output:
            return None
        token = generation.output[-1]
        return token if token in self.params.stop_token_ids else None


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
