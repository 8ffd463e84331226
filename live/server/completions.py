"""/v1/completions and /v1/chat/completions: continue texts, token ids and chats, whole or as a stream."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

from live.generation import TopLogprobs
from live.server.connection import encode, event
from live.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from live.server.replies import (
    Alternative,
    Chat,
    ChatChoice,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
    Usage,
    bad_request,
)  # fmt: skip
from live.server.request_state import OutputDelta, RequestState, Response
from live.server.service import Service

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI and of vLLM."""

PLACE = "\0"
"""In the text of an event: what differs from one part of an output to the next."""

_Request = TypeVar("_Request", bound=GenerationRequest)


def create_completion(service: Service, request: CompletionRequest, headers: Mapping[str, str]) -> Response:
    """Continue prompts; the response is whole or a stream."""
    _check(service, request)
    prompts = service.prompts(request.prompt, "prompt", request.add_special_tokens is not False, request.n or 1)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    for prompt in prompts:
        service.inputs.check_length(prompt, max_tokens, "max_tokens")
    return CompletionResponse(service, request, prompts, max_tokens, headers)


def create_chat_completion(service: Service, request: ChatRequest, headers: Mapping[str, str]) -> Response:
    """Continue a chat; the response is whole or a stream."""
    _check(service, request)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs", "expected logprobs to be true")
    service.check_capacity(request.n or 1)
    prompt = service.inputs.chat(request)
    return ChatResponse(service, request, [prompt], _chat_max_tokens(service, request, prompt), headers)


def _check(service: Service, request: GenerationRequest) -> None:
    """Refuse a model that generates no tokens, and options that contradict each other."""
    if service.labels:
        reason = f"{service.config.name} is a classification model and generates no tokens"
        raise bad_request("model", f"{reason}: see /classify, /score, /rerank")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs", "not served in a stream")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "expected stream to be true")


def _chat_max_tokens(service: Service, request: ChatRequest, prompt: list[int]) -> int:
    """The request's limit, or else as many tokens as fit behind the prompt."""
    check = service.inputs.check_length
    if request.max_completion_tokens is not None:
        return check(prompt, request.max_completion_tokens, "max_completion_tokens")
    if request.max_tokens is not None:
        return check(prompt, request.max_tokens, "max_tokens")
    return check(prompt, max(service.inputs.max_model_len - len(prompt), 1), "messages")


class GenerationResponse(Response, Generic[_Request]):
    """A response with generated tokens. Subclasses format choices.

    Args:
        prompts: token ids, each with `n` outputs. max_tokens: of each output. headers: of the HTTP request.

    Raises:
        ApiError: as `Service.generations`.
    """

    kind = "cmpl"
    chunk_object = "text_completion"

    def __init__(
        self, service: Service, request: _Request, prompts: list[list[int]], max_tokens: int, headers: Mapping[str, str]
    ) -> None:
        self.service = service
        self.inputs = service.inputs
        self.request = request
        self.prompts = prompts
        self.states = service.generations(request, prompts, max_tokens, headers)
        self.stream = bool(request.stream)
        self._has_logprobs = request.num_logprobs >= 0
        self.id = f"{self.kind}-{secrets.token_hex(16)}"
        self.created = int(time.time())

    @abstractmethod
    def deltas(self, state: RequestState) -> list[Any]:
        """The new part of an output, as choices of a stream."""

    def chunk(self, choices: list[Any]) -> dict[str, Any]:
        """One event of a stream."""
        return {
            "id": self.id,
            "object": self.chunk_object,
            "created": self.created,
            "model": self.request.model or self.service.config.name,
            "choices": choices,
        }

    @abstractmethod
    def middle_choice(self) -> dict[str, Any]:
        """A choice of a stream that is neither first nor last, without logprobs, with `PLACE` for each value of a part:
        the index, the text, and the token ids if they are returned.
        """

    def events(self) -> bytes:
        text = ""
        for state in self.states:
            if state.has_delta:
                text += self._events(state)
        return text.encode()

    def _events(self, state: RequestState) -> str:
        """The new part of an output. To fill in an event takes a third of the time that it takes to encode it."""
        if state.finished or not state.num_read or self._has_logprobs:
            before, after = self._frame
            return "".join([before + encode(choice) + after for choice in self.deltas(state)])
        delta = state.read()
        begin, of_index, of_text, *of_ids = self._middle
        text = f"{begin}{state.index}{of_index}{encode(delta.text)}{of_text}"
        if of_ids:
            token_ids = ",".join(map(str, state.generation.output[delta.begin : delta.end]))
            text += f"[{token_ids}]{of_ids[0]}"
        return text

    @cached_property
    def _frame(self) -> tuple[str, str]:
        """The text of an event before its choice and behind it, the same in all events."""
        extra = {"usage": None} if self.request.includes_usage else {}
        before, after = encode(self.chunk([]) | extra).split('"choices":[]')
        return f'data: {before}"choices":[', f"]{after}\n\n"

    @cached_property
    def _middle(self) -> list[str]:
        """The text of an event with a `middle_choice`, cut at its places."""
        before, after = self._frame
        first, *parts, last = encode(self.middle_choice()).split(encode(PLACE))
        return [before + first, *parts, last + after]

    def last_events(self) -> bytes:
        return event(self.chunk([]) | {"usage": self.usage()}) if self.request.includes_usage else b""

    def usage(self) -> Usage:
        """The token counts so far. A prompt with several outputs counts once."""
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = sum(len(state.generation.output) for state in self.states)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def prompt_logprobs(self, state: RequestState) -> list[dict[str, Any] | None]:
        """The log-probabilities of each prompt token and of the most likely tokens in its place, by id, in vLLM's form.

        The first entry is None.
        """
        generation = state.generation
        rows = zip(
            generation.prompt.tolist(), generation.prompt_token_logprobs, generation.prompt_top_logprobs, strict=True
        )
        return [None if logprob is None else self._ranked(token, logprob, tops) for token, logprob, tops in rows]

    def _ranked(self, token: int, logprob: float, tops: TopLogprobs) -> dict[str, Any]:
        text = self.inputs.token_text
        ranked = {token: {"logprob": logprob, "rank": None, "decoded_token": text(token)}}
        for rank, (alternative, value) in enumerate(tops, 1):
            ranked[alternative] = {"logprob": value, "rank": rank, "decoded_token": text(alternative)}
        return {str(token_id): entry for token_id, entry in ranked.items()}


class CompletionResponse(GenerationResponse[CompletionRequest]):
    """The response to one or several prompts, which are texts or token ids."""

    @cached_property
    def _text_offsets(self) -> list[int]:
        return [0] * len(self.states)

    def document(self) -> Completion:
        document: Completion = self.chunk([self._choice(state) for state in self.states])  # type: ignore[assignment]
        document["usage"] = self.usage()
        return document

    def deltas(self, state: RequestState) -> list[CompletionChoice]:
        return [self._choice(state)]

    def middle_choice(self) -> dict[str, Any]:
        returned = {"token_ids": PLACE} if self._returns_token_ids else {}
        ends = {"logprobs": None, "finish_reason": None, "stop_reason": None}
        return {"index": PLACE, "text": PLACE, **ends, **returned}

    def _choice(self, state: RequestState) -> CompletionChoice:
        """The new part of an output; without a stream, all of it. The first part also holds the prompt's fields."""
        request, first = self.request, not state.num_read
        delta = state.read()
        echoed = bool(request.echo) and first
        choice: CompletionChoice = {
            "index": state.index,
            "text": self._prompt_text(state) + delta.text if echoed else delta.text,
            "logprobs": None if request.logprobs is None else self._logprobs(state, delta, echoed),
            "finish_reason": state.finish_reason if delta.last else None,
            "stop_reason": state.stop_reason if delta.last else None,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.prompt_logprobs(state)
        if self._returns_token_ids:
            choice["token_ids"] = state.generation.output[delta.begin : delta.end]
            if first:
                choice["prompt_token_ids"] = self._prompt(state)
        return choice

    @property
    def _returns_token_ids(self) -> bool:
        return bool(self.request.return_token_ids) or self.inputs.tokenizer is None

    def _prompt(self, state: RequestState) -> list[int]:
        return self.prompts[state.index // (self.request.n or 1)]

    def _prompt_text(self, state: RequestState) -> str:
        prompt = self.request.prompt
        text = prompt if isinstance(prompt, str) else prompt[state.index // (self.request.n or 1)]
        if isinstance(text, str):
            return text
        tokenizer = self.inputs.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self._prompt(state), skip_special=False)

    def _logprobs(self, state: RequestState, delta: OutputDelta, echoed: bool) -> CompletionLogprobs:
        generation, limit, text_of = state.generation, self.request.logprobs or 0, self.inputs.token_text
        tokens: list[int] = generation.output[delta.begin : delta.end]
        values: list[float | None] = [*generation.token_logprobs[delta.begin : delta.end]]
        tops = generation.top_logprobs[delta.begin : delta.end]
        if echoed:
            tokens = self._prompt(state) + tokens
            values = generation.prompt_token_logprobs + values
            tops = [top[:limit] for top in generation.prompt_top_logprobs] + tops
        texts = [text_of(token) for token in tokens]
        result: CompletionLogprobs = {"tokens": texts, "token_logprobs": values, "top_logprobs": [], "text_offset": []}
        for text, value, top in zip(texts, values, tops, strict=True):
            result["text_offset"].append(self._text_offsets[state.index])
            self._text_offsets[state.index] += len(text)
            by_text = {text_of(token): logprob for token, logprob in reversed(top)}  # of equal texts the most likely
            result["top_logprobs"].append(None if value is None else {**by_text, text: value})
        return result


class ChatResponse(GenerationResponse[ChatRequest]):
    """The response to a chat, which is rendered as one prompt."""

    kind = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def document(self) -> Chat:
        document: Chat = self.chunk([self._choice(state) for state in self.states])  # type: ignore[assignment]
        document["object"] = "chat.completion"
        document["usage"] = self.usage()
        if self.request.prompt_logprobs is not None:
            document["prompt_logprobs"] = self.prompt_logprobs(self.states[0])
        if self.request.return_token_ids:
            document["prompt_token_ids"] = self.prompts[0]
        return document

    def _choice(self, state: RequestState) -> ChatChoice:
        delta = state.read()
        choice: ChatChoice = {
            "index": state.index,
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": self._logprobs(state, delta),
            "finish_reason": state.finish_reason,
            "stop_reason": state.stop_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = state.generation.output
        return choice

    def deltas(self, state: RequestState) -> list[dict[str, Any]]:
        """The new part of an output; the first choice of a stream names the role."""
        role = {"role": "assistant", "content": ""}
        choices = [_delta_choice(state.index, role)] if not state.num_read else []
        delta = state.read()
        choice = _delta_choice(state.index, {"content": delta.text})
        choice["logprobs"] = self._logprobs(state, delta)
        if delta.last:
            choice["finish_reason"], choice["stop_reason"] = state.finish_reason, state.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = state.generation.output[delta.begin : delta.end]
        return [*choices, choice]

    def middle_choice(self) -> dict[str, Any]:
        returned = {"token_ids": PLACE} if self.request.return_token_ids else {}
        return _delta_choice(PLACE, {"content": PLACE}) | returned

    def _logprobs(self, state: RequestState, delta: OutputDelta) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        generation = state.generation
        content: list[TokenLogprob] = []
        for i in range(delta.begin, delta.end):
            tops = [self._alternative(*pair) for pair in generation.top_logprobs[i]]
            token = self._alternative(generation.output[i], generation.token_logprobs[i])
            content.append({**token, "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _alternative(self, token: int, logprob: float) -> Alternative:
        tokenizer = self.inputs.tokenizer
        raw = b"" if tokenizer is None else tokenizer.token_bytes(token)
        return {"token": self.inputs.token_text(token), "logprob": logprob, "bytes": list(raw)}


def _delta_choice(index: int | str, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
