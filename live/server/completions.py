"""/v1/completions: continues texts or token ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from live.server.asgi import HttpExchange
from live.server.completion_output import CompletionOutput, OutputDelta
from live.server.generation_response import GenerationResponse, respond
from live.server.protocol import CompletionRequest, check_generation_request
from live.server.replies import Completion, CompletionChoice, CompletionLogprobs
from live.server.service import Service

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI and of vLLM."""


async def create_completion(
    service: Service, request: CompletionRequest, exchange: HttpExchange
) -> Mapping[str, Any] | AsyncIterator[bytes]:
    """Continue prompts; the response is whole or a stream."""
    return await respond(CompletionResponse, service, request, exchange)


class CompletionResponse(GenerationResponse[CompletionRequest]):
    """The response to one or several prompts, which are texts or token ids."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        service.model.check_generates()
        check_generation_request(request)
        prompts = service.prompts(request.prompt, "prompt", request.add_special_tokens is not False, request.n or 1)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        for prompt in prompts:
            service.inputs.check_length(prompt, max_tokens, "max_tokens")
        super().__init__(service, request, prompts, max_tokens, "cmpl")
        self.text_offsets = [0] * (len(prompts) * self.n)

    @property
    def logprobs(self) -> int:
        """See `GenerationResponse.logprobs`."""
        return -1 if self.request.logprobs is None else self.request.logprobs

    @property
    def prompt_logprobs(self) -> int:
        """See `GenerationResponse.prompt_logprobs`. An echoed prompt has those of the output."""
        return max(super().prompt_logprobs, self.logprobs) if self.request.echo else super().prompt_logprobs

    def document(self) -> Completion:
        """See `GenerationResponse.document`."""
        document = self.chunk([self._choice(output) for output in self.outputs])
        document["usage"] = self.usage()
        return document

    def deltas(self, output: CompletionOutput) -> list[CompletionChoice]:
        """See `GenerationResponse.deltas`."""
        return [self._choice(output)]

    def chunk(self, choices: list[CompletionChoice]) -> Completion:
        """See `GenerationResponse.chunk`."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model or self.service.model.name,
            "choices": choices,
        }

    def _choice(self, output: CompletionOutput) -> CompletionChoice:
        """The new part of an output; without a stream, all of it. The first part also holds the prompt's fields."""
        request, first = self.request, not output.num_read
        delta = output.read()
        echoed = bool(request.echo) and first
        choice: CompletionChoice = {
            "index": output.index,
            "text": self._prompt_text(output) + delta.text if echoed else delta.text,
            "logprobs": None if request.logprobs is None else self._logprobs(output, delta, echoed),
            "finish_reason": output.finish_reason if delta.last else None,
            "stop_reason": output.stop_reason if delta.last else None,
        }
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = output.prompt_logprobs()
        if request.return_token_ids or self.service.inputs.tokenizer is None:
            choice["token_ids"] = output.state.generation.output[delta.begin : delta.end]
            if first:
                choice["prompt_token_ids"] = self._prompt(output)
        return choice

    def _prompt(self, output: CompletionOutput) -> list[int]:
        return self.prompts[output.index // self.n]

    def _prompt_text(self, output: CompletionOutput) -> str:
        prompt = self.request.prompt
        if isinstance(prompt, str):
            return prompt
        text = prompt[output.index // self.n]
        if isinstance(text, str):
            return text
        tokenizer = self.service.inputs.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self._prompt(output), skip_special=False)

    def _logprobs(self, output: CompletionOutput, delta: OutputDelta, echoed: bool) -> CompletionLogprobs:
        generation, limit, text_of = output.state.generation, self.request.logprobs or 0, self.service.inputs.token_text
        tokens: list[int] = generation.output[delta.begin : delta.end]
        values: list[float | None] = [*generation.token_logprobs[delta.begin : delta.end]]
        tops = generation.top_logprobs[delta.begin : delta.end]
        if echoed:
            tokens = self._prompt(output) + tokens
            values = generation.prompt_token_logprobs + values
            tops = [each[:limit] for each in generation.prompt_top_logprobs] + tops
        texts = [text_of(token) for token in tokens]
        result: CompletionLogprobs = {"tokens": texts, "token_logprobs": values, "top_logprobs": [], "text_offset": []}
        for text, value, top in zip(texts, values, tops, strict=True):
            result["text_offset"].append(self.text_offsets[output.index])
            self.text_offsets[output.index] += len(text)
            by_text = {text_of(token): each for token, each in reversed(top)}  # of equal texts the most likely
            result["top_logprobs"].append(None if value is None else {**by_text, text: value})
        return result
