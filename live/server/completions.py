"""/v1/completions: texts or token ids are continued."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from live.server.asgi import HttpExchange, event
from live.server.async_engine import RequestGroup
from live.server.completion_output import CompletionOutput, OutputDelta, outputs_with_deltas, usage
from live.server.identifiers import response_id, unix_time
from live.server.protocol import CompletionRequest, check_generation_request
from live.server.replies import Completion, CompletionChoice, CompletionLogprobs
from live.server.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's and vLLM's."""


async def create_completion(
    service: Service, request: CompletionRequest, exchange: HttpExchange
) -> Completion | AsyncIterator[bytes]:
    """Continue prompts; the response is whole or a stream."""
    completion = await service.offload.run(exchange.size, partial(CompletionResponse, service, request))
    if request.stream:
        return _stream(completion, exchange)
    with service.async_engine.group(exchange) as group:
        completion.submit(group)
        await group.finished()
    document = completion.document([completion.choice(output) for output in completion.outputs])
    document["usage"] = usage(completion.prompts, completion.outputs)
    return document


async def _stream(completion: CompletionResponse, exchange: HttpExchange) -> AsyncIterator[bytes]:
    with_usage = completion.request.includes_usage
    extra = {"usage": None} if with_usage else {}
    with completion.service.async_engine.group(exchange) as group:
        completion.submit(group)
        async for outputs in outputs_with_deltas(group, completion.outputs):
            choices = [completion.choice(output) for output in outputs]
            yield b"".join([event({**completion.document([choice]), **extra}) for choice in choices])
    if with_usage:
        yield event({**completion.document([]), "usage": usage(completion.prompts, completion.outputs)})


class CompletionResponse:
    """The response to one request: it checks and tokenises the request, submits it, and formats its outputs.

    Attributes:
        prompts: token ids. outputs: `n` for each prompt, once they are submitted.
    """

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self.service, self.request = service, request
        service.model.check_generates()
        check_generation_request(request)
        self.n = request.n or 1
        self.prompts = service.prompts(request.prompt, "prompt", request.add_special_tokens is not False, self.n)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        for prompt in self.prompts:
            service.inputs.check_length(prompt, max_tokens, "max_tokens")
        self.max_tokens = max_tokens
        self.stop = service.generations.stop_conditions(request)
        self.outputs: list[CompletionOutput] = []
        self.text_offsets: list[int] = []
        self.id, self.created = response_id("cmpl"), unix_time()

    def submit(self, group: RequestGroup) -> None:
        """Submit `n` generations for each prompt."""
        request = self.request
        logprobs = -1 if request.logprobs is None else request.logprobs
        prompt_logprobs = -1 if request.prompt_logprobs is None else request.prompt_logprobs
        if request.echo:
            prompt_logprobs = max(prompt_logprobs, logprobs)
        seed = self.service.generations.seed(request)
        self.service.check_capacity(len(self.prompts) * self.n)  # others may have come while these were being encoded
        for prompt in self.prompts:
            for i in range(self.n):
                output = CompletionOutput.start(
                    self.service, request, self.stop, group, prompt, self.max_tokens, len(self.outputs),
                    seed=seed + i, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
                )  # fmt: skip
                self.outputs.append(output)
                self.text_offsets.append(0)

    def document(self, choices: list[CompletionChoice]) -> Completion:
        """A response with these choices."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model or self.service.model.name,
            "choices": choices,
        }

    def choice(self, output: CompletionOutput) -> CompletionChoice:
        """The new part of an output; without a stream, all of it. The first part also holds what is of the prompt."""
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
