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
from live.server.replies import Alternative, Chat, ChatLogprobs, Completion, CompletionLogprobs, Usage, bad_request
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
    prompt, field = service.inputs.chat(request), "messages"
    max_tokens = max(service.inputs.max_model_len - len(prompt), 1)  # as many as fit, unless the request has a limit
    for name in ("max_tokens", "max_completion_tokens"):
        if (limit := getattr(request, name)) is not None:
            field, max_tokens = name, limit
    service.inputs.check_length(prompt, max_tokens, field)
    return ChatResponse(service, request, [prompt], max_tokens, headers)


def _check(service: Service, request: GenerationRequest) -> None:
    """Refuse a model that generates no tokens, and options that contradict each other."""
    if service.labels:
        reason = f"{service.config.name} is a classification model and generates no tokens"
        raise bad_request("model", f"{reason}: see /classify, /score, /rerank")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs", "not served in a stream")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options", "expected stream to be true")


class GenerationResponse(Response, Generic[_Request]):
    """A response with generated tokens, of whose choices subclasses have the form.

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
        self.inputs = service.inputs
        self.request = request
        self.prompts = prompts
        self.states = service.generations(request, prompts, max_tokens, headers)
        self.stream = bool(request.stream)
        self._returns_token_ids = bool(request.return_token_ids)
        self._head = {
            "id": f"{self.kind}-{secrets.token_hex(16)}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": request.model or service.config.name,
        }

    @abstractmethod
    def choice(self, index: int | str, text: str) -> dict[str, Any]:
        """A choice of a stream that is neither first nor last, without logprobs and token ids."""

    @abstractmethod
    def deltas(self, state: RequestState) -> list[dict[str, Any]]:
        """The new part of an output, as choices of a stream."""

    def token_ids(self, state: RequestState, delta: OutputDelta) -> dict[str, Any]:
        """The field of a choice with its tokens, if the request wants them."""
        return {"token_ids": state.generation.output[delta.begin : delta.end]} if self._returns_token_ids else {}

    def events(self) -> bytes:
        return "".join([self._events(state) for state in self.states if state.has_delta]).encode()

    def _events(self, state: RequestState) -> str:
        """The new part of an output. To fill in an event takes a third of the time that it takes to encode it."""
        if state.finished or not state.num_read or self.request.num_logprobs >= 0:
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
        before, after = encode({**self._head, "choices": [], **extra}).split('"choices":[]')
        return f'data: {before}"choices":[', f"]{after}\n\n"

    @cached_property
    def _middle(self) -> list[str]:
        """The text of an event with a choice of the middle, cut where its index, its text and its token ids are."""
        before, after = self._frame
        returned = {"token_ids": PLACE} if self._returns_token_ids else {}
        first, *parts, last = encode({**self.choice(PLACE, PLACE), **returned}).split(encode(PLACE))
        return [before + first, *parts, last + after]

    def last_events(self) -> bytes:
        last = {**self._head, "choices": [], "usage": self.usage()}
        return event(last) if self.request.includes_usage else b""

    def usage(self) -> Usage:
        """The token counts so far. A prompt with several outputs counts once."""
        prompt_tokens = sum(map(len, self.prompts))
        completion_tokens = sum(len(state.generation.output) for state in self.states)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def prompt_logprobs(self, state: RequestState) -> dict[str, Any]:
        """The field with the log-probabilities of each prompt token and of the most likely tokens in its place, by id.

        It has vLLM's form, in which the first entry is None; there is none unless the request wants it.
        """
        if self.request.prompt_logprobs is None:
            return {}
        prompt = state.generation
        rows = zip(prompt.prompt.tolist(), prompt.prompt_token_logprobs, prompt.prompt_top_logprobs, strict=True)
        entries = [None if logprob is None else self._ranked(token, logprob, tops) for token, logprob, tops in rows]
        return {"prompt_logprobs": entries}

    def _ranked(self, token: int, logprob: float, tops: TopLogprobs) -> dict[str, Any]:
        rows = {token: (logprob, None)} | {other: (value, rank) for rank, (other, value) in enumerate(tops, 1)}
        text = self.inputs.token_text
        return {
            str(token_id): {"logprob": value, "rank": rank, "decoded_token": text(token_id)}
            for token_id, (value, rank) in rows.items()
        }


class CompletionResponse(GenerationResponse[CompletionRequest]):
    """The response to one or several prompts, which are texts or token ids."""

    def __init__(self, service: Service, request: CompletionRequest, *args: Any) -> None:
        super().__init__(service, request, *args)
        self._returns_token_ids = self._returns_token_ids or self.inputs.tokenizer is None
        self._text_offsets = [0] * len(self.states)

    def document(self) -> Completion:
        choices = [choice for state in self.states for choice in self.deltas(state)]
        return {**self._head, "choices": choices, "usage": self.usage()}  # type: ignore[typeddict-item]

    def choice(self, index: int | str, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def deltas(self, state: RequestState) -> list[dict[str, Any]]:
        """The new part of an output; without a stream, all of it. The first part also holds the prompt's fields."""
        request, first = self.request, not state.num_read
        delta = state.read()
        echoed = bool(request.echo) and first
        choice = self.choice(state.index, self._prompt_text(state) + delta.text if echoed else delta.text)
        if request.logprobs is not None:
            choice["logprobs"] = self._logprobs(state, delta, echoed)
        if delta.last:
            choice["finish_reason"], choice["stop_reason"] = state.finish
        choice |= self.prompt_logprobs(state) | self.token_ids(state, delta)
        if self._returns_token_ids and first:
            choice["prompt_token_ids"] = self._of_prompt(self.prompts, state)
        return [choice]

    def _of_prompt(self, values: Any, state: RequestState) -> Any:
        return values[state.index // (self.request.n or 1)]

    def _prompt_text(self, state: RequestState) -> str:
        prompt = self.request.prompt
        text = prompt if isinstance(prompt, str) else self._of_prompt(prompt, state)
        if isinstance(text, str):
            return text
        tokenizer = self.inputs.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self._of_prompt(self.prompts, state), skip_special=False)

    def _logprobs(self, state: RequestState, delta: OutputDelta, echoed: bool) -> CompletionLogprobs:
        generation, limit, text_of = state.generation, self.request.logprobs or 0, self.inputs.token_text
        tokens: list[int] = generation.output[delta.begin : delta.end]
        values: list[float | None] = [*generation.token_logprobs[delta.begin : delta.end]]
        tops = generation.top_logprobs[delta.begin : delta.end]
        if echoed:
            tokens = self._of_prompt(self.prompts, state) + tokens
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
        choices = [self._part(state, "message", {"role": "assistant"}) for state in self.states]
        document: Any = {**self._head, "object": "chat.completion", "choices": choices, "usage": self.usage()}
        document |= self.prompt_logprobs(self.states[0])
        if self._returns_token_ids:
            document["prompt_token_ids"] = self.prompts[0]
        return document  # type: ignore[no-any-return]

    def choice(self, index: int | str, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def deltas(self, state: RequestState) -> list[dict[str, Any]]:
        """The new part of an output; the first choice of a stream names the role."""
        role = {"role": "assistant", "content": ""}
        choices = [] if state.num_read else [self.choice(state.index, "") | {"delta": role}]
        return [*choices, self._part(state, "delta", {})]

    def _part(self, state: RequestState, field: str, message: dict[str, str]) -> dict[str, Any]:
        """The new part of an output, or all of it, as a message."""
        delta = state.read()
        choice: dict[str, Any] = {"index": state.index, field: {**message, "content": delta.text}}
        choice |= {"logprobs": self._logprobs(state, delta), "finish_reason": None}
        if delta.last:
            choice["finish_reason"], choice["stop_reason"] = state.finish
        return choice | self.token_ids(state, delta)

    def _logprobs(self, state: RequestState, delta: OutputDelta) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        generation, part = state.generation, slice(delta.begin, delta.end)
        rows = zip(generation.output[part], generation.token_logprobs[part], generation.top_logprobs[part], strict=True)
        content: Any = [
            {**self._alternative(token, logprob), "top_logprobs": [self._alternative(*pair) for pair in tops]}
            for token, logprob, tops in rows
        ]
        return {"content": content, "refusal": None}

    def _alternative(self, token: int, logprob: float) -> Alternative:
        tokenizer = self.inputs.tokenizer
        raw = b"" if tokenizer is None else tokenizer.token_bytes(token)
        return {"token": self.inputs.token_text(token), "logprob": logprob, "bytes": list(raw)}
