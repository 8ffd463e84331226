"""/v1/chat/completions: continues a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from live.server.asgi import HttpExchange
from live.server.completion_output import CompletionOutput, OutputDelta
from live.server.errors import bad_request
from live.server.generation_response import GenerationResponse, respond
from live.server.protocol import ChatRequest, check_generation_request
from live.server.replies import Chat, ChatChoice, ChatLogprobs
from live.server.service import Service


async def create_chat_completion(
    service: Service, request: ChatRequest, exchange: HttpExchange
) -> Mapping[str, Any] | AsyncIterator[bytes]:
    """Continue a chat; the response is whole or a stream."""
    return await respond(ChatResponse, service, request, exchange)


class ChatResponse(GenerationResponse[ChatRequest]):
    """The response to a chat, which is rendered as one prompt."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        service.model.check_generates()
        check_generation_request(request)
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs", "expected logprobs to be true")
        service.check_capacity(request.n or 1)
        prompt = service.inputs.chat(request)
        super().__init__(service, request, [prompt], _max_tokens(service, request, prompt), "chatcmpl")

    @property
    def logprobs(self) -> int:
        """See `GenerationResponse.logprobs`."""
        return (self.request.top_logprobs or 0) if self.request.logprobs else -1

    def document(self) -> Chat:
        """See `GenerationResponse.document`."""
        document: Chat = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.request.model or self.service.model.name,
            "choices": [self._choice(output) for output in self.outputs],
            "usage": self.usage(),
        }
        if self.request.prompt_logprobs is not None:
            document["prompt_logprobs"] = self.outputs[0].prompt_logprobs()
        if self.request.return_token_ids:
            document["prompt_token_ids"] = self.prompts[0]
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
        """See `GenerationResponse.chunk`."""
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.request.model or self.service.model.name,
            "choices": choices,
        }

    def deltas(self, output: CompletionOutput) -> list[dict[str, Any]]:
        """See `GenerationResponse.deltas`; the first choice of a stream names the role."""
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


def _max_tokens(service: Service, request: ChatRequest, prompt: list[int]) -> int:
    """The request's limit, or else as many tokens as fit behind the prompt."""
    check = service.inputs.check_length
    if request.max_completion_tokens is not None:
        return check(prompt, request.max_completion_tokens, "max_completion_tokens")
    if request.max_tokens is not None:
        return check(prompt, request.max_tokens, "max_tokens")
    return check(prompt, max(service.model.max_model_len - len(prompt), 1), "messages")


def _delta_choice(output: CompletionOutput, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
