"""The three objects of a request: its sampling parameters, the state of each output, and the response."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from kernels import sampling
from live.generation import Generation
from live.server.protocol import GenerationRequest
from live.server.replies import ApiError, FinishReason
from live.text.stream import StopStrings, TextStream


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
