"""/v1/chat/completions: a chat is continued."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from live.server.asgi import HttpExchange, event
from live.server.async_engine import RequestGroup
from live.server.completion_output import CompletionOutput, OutputDelta, outputs_with_deltas, usage
from live.server.errors import bad_request
from live.server.identifiers import response_id, unix_time
from live.server.protocol import ChatRequest, check_generation_request
from live.server.replies import Chat, ChatChoice, ChatLogprobs
from live.server.service import Service


async def create_chat_completion(
    service: Service, request: ChatRequest, exchange: HttpExchange
) -> Chat | AsyncIterator[bytes]:
    """Continue a chat; the response is whole or a stream."""
    chat = await service.offload.run(exchange.size, partial(ChatResponse, service, request))
    if request.stream:
        return _stream(chat, exchange)
    with service.async_engine.group(exchange) as group:
        chat.submit(group)
        await group.finished()
    return chat.document()


async def _stream(chat: ChatResponse, exchange: HttpExchange) -> AsyncIterator[bytes]:
    with_usage = chat.request.includes_usage
    extra = {"usage": None} if with_usage else {}
    with chat.service.async_engine.group(exchange) as group:
        chat.submit(group)
        async for outputs in outputs_with_deltas(group, chat.outputs):
            choices = [choice for output in outputs for choice in chat.delta(output)]
            yield b"".join([event({**chat.chunk([choice]), **extra}) for choice in choices])
    if with_usage:
        yield event({**chat.chunk([]), "usage": usage([chat.prompt], chat.outputs)})


class ChatResponse:
    """The response to one request: it checks and renders the chat, submits it, and formats its outputs.

    Attributes:
        prompt: token ids. outputs: `n` of them, once they are submitted.
    """

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self.service, self.request = service, request
        service.model.check_generates()
        check_generation_request(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs", "expected logprobs to be true")
        service.check_capacity(request.n or 1)
        self.prompt = service.inputs.chat(request)
        self.max_tokens = self._max_tokens()
        self.stop = service.generations.stop_conditions(request)
        self.outputs: list[CompletionOutput] = []
        self.id, self.created = response_id("chatcmpl"), unix_time()

    def _max_tokens(self) -> int:
        """The request's limit, or else as many tokens as fit behind the prompt."""
        request, check = self.request, self.service.inputs.check_length
        if request.max_completion_tokens is not None:
            return check(self.prompt, request.max_completion_tokens, "max_completion_tokens")
        if request.max_tokens is not None:
            return check(self.prompt, request.max_tokens, "max_tokens")
        return check(self.prompt, max(self.service.model.max_model_len - len(self.prompt), 1), "messages")

    def submit(self, group: RequestGroup) -> None:
        """Submit `n` generations of the chat."""
        request = self.request
        logprobs = (request.top_logprobs or 0) if request.logprobs else -1
        prompt_logprobs = -1 if request.prompt_logprobs is None else request.prompt_logprobs
        seed = self.service.generations.seed(request)
        self.service.check_capacity(request.n or 1)  # others may have come while the chat was being encoded
        for i in range(request.n or 1):
            output = CompletionOutput.start(
                self.service, request, self.stop, group, self.prompt, self.max_tokens, i,
                seed=seed + i, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
            )  # fmt: skip
            self.outputs.append(output)

    def document(self) -> Chat:
        """The whole response."""
        document: Chat = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.request.model or self.service.model.name,
            "choices": [self._choice(output) for output in self.outputs],
            "usage": usage([self.prompt], self.outputs),
        }
        if self.request.prompt_logprobs is not None:
            document["prompt_logprobs"] = self.outputs[0].prompt_logprobs()
        if self.request.return_token_ids:
            document["prompt_token_ids"] = self.prompt
        return document

    def _choice(self, output: CompletionOutput) -> ChatChoice:
        delta = output.read()
        choice: ChatChoice = {
            "index": output.index,
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": self._logprobs(output, delta),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = output.state.generation.output
        return choice

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One event of the stream."""
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.request.model or self.service.model.name,
            "choices": choices,
        }

    def delta(self, output: CompletionOutput) -> list[dict[str, Any]]:
        """The new part of an output as choices; the first choice of a stream names the role."""
        choices = [_delta_choice(output, {"role": "assistant", "content": ""})] if not output.num_read else []
        delta = output.read()
        choice = _delta_choice(output, {"content": delta.text})
        choice["logprobs"] = self._logprobs(output, delta)
        if delta.last:
            choice["finish_reason"], choice["stop_reason"] = output.finish_reason, output.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = output.state.generation.output[delta.begin : delta.end]
        return [*choices, choice]

    def _logprobs(self, output: CompletionOutput, delta: OutputDelta) -> ChatLogprobs | None:
        return {"content": output.token_logprobs(delta), "refusal": None} if self.request.logprobs else None


def _delta_choice(output: CompletionOutput, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
