"""Responses with generated tokens, whole or as a stream: the part that completions and chats share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from live.server.asgi import HttpExchange, event
from live.server.async_engine import RequestGroup
from live.server.completion_output import CompletionOutput, outputs_with_deltas, usage
from live.server.contracts import Contract, read_contract
from live.server.identifiers import response_id, unix_time
from live.server.protocol import GenerationRequest
from live.server.replies import Usage
from live.server.service import Service

_Request = TypeVar("_Request", bound=GenerationRequest)


class GenerationResponse(ABC, Generic[_Request]):
    """Submits the generations of a request, and formats their outputs.

    A subclass checks and encodes the request, and formats choices.

    Args:
        prompts: token ids. max_tokens: of each output.
        kind: begins the id of the response.

    Attributes:
        outputs: `n` for each prompt, once they are submitted.
        contract: of all of them.

    Raises:
        ApiError: 400 for stop strings without a tokenizer.
    """

    def __init__(
        self, service: Service, request: _Request, prompts: list[list[int]], max_tokens: int, kind: str
    ) -> None:
        self.service, self.request, self.prompts, self.max_tokens = service, request, prompts, max_tokens
        self.n = request.n or 1
        self.stop = service.generations.stop_conditions(request)
        self.outputs: list[CompletionOutput] = []
        self.contract = Contract()
        self.id, self.created = response_id(kind), unix_time()

    @property
    @abstractmethod
    def logprobs(self) -> int:
        """The number of alternatives to each output token; -1 for no log-probabilities."""

    @property
    def prompt_logprobs(self) -> int:
        """The number of alternatives to each prompt token; -1 for no log-probabilities."""
        return -1 if self.request.prompt_logprobs is None else self.request.prompt_logprobs

    @abstractmethod
    def document(self) -> Mapping[str, Any]:
        """The whole response, when all outputs are finished."""

    @abstractmethod
    def deltas(self, output: CompletionOutput) -> list[Any]:
        """The new part of an output, as choices of a stream."""

    @abstractmethod
    def chunk(self, choices: list[Any]) -> Mapping[str, Any]:
        """One event of a stream."""

    def submit(self, group: RequestGroup) -> None:
        """Submit `n` generations for each prompt.

        Raises:
            ApiError: as `Service.check_capacity` and `RequestGroup.submit`.
        """
        seed = self.service.generations.seed(self.request)
        self.service.check_capacity(len(self.prompts) * self.n)  # others may have come while these were being encoded
        for prompt in self.prompts:
            for i in range(self.n):
                output = CompletionOutput.start(
                    self.service, self.request, self.stop, group, prompt, self.max_tokens, len(self.outputs),
                    seed=seed + i, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs,
                    contract=self.contract,
                )  # fmt: skip
                self.outputs.append(output)

    def usage(self) -> Usage:
        """The token counts so far."""
        return usage(self.prompts, self.outputs)


async def respond(
    make_response: Callable[[Service, _Request], GenerationResponse[_Request]],
    service: Service,
    request: _Request,
    exchange: HttpExchange,
) -> Mapping[str, Any] | AsyncIterator[bytes]:
    """Run a request; the response is whole or a stream.

    Args:
        make_response: checks and encodes the request, in a thread if it is large.
    """
    contract = read_contract(exchange, request.priority, service.config.classes)
    response = await service.offload.run(exchange.size, partial(make_response, service, request))
    response.contract = contract
    if request.stream:
        return _stream(response, exchange)
    with service.async_engine.group(exchange) as group:
        response.submit(group)
        await group.finished()
    return response.document()


async def _stream(response: GenerationResponse[_Request], exchange: HttpExchange) -> AsyncIterator[bytes]:
    with_usage = response.request.includes_usage
    extra = {"usage": None} if with_usage else {}
    with response.service.async_engine.group(exchange) as group:
        response.submit(group)
        async for outputs in outputs_with_deltas(group, response.outputs):
            choices = [choice for output in outputs for choice in response.deltas(output)]
            yield b"".join([event({**response.chunk([choice]), **extra}) for choice in choices])
    if with_usage:
        yield event({**response.chunk([]), "usage": response.usage()})
