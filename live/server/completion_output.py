"""One output of a request, which a response reads at once, or delta by delta in a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self

from live.generation import TopLogprobs
from live.server.async_engine import RequestGroup
from live.server.contracts import Contract
from live.server.protocol import GenerationRequest
from live.server.replies import Alternative, FinishReason, TokenLogprob, Usage
from live.server.request_state import OutputText, RequestState
from live.server.service import Service
from live.server.stop_conditions import StopConditions


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The new part of an output: its text, the indices of its tokens, and whether it is the last part."""

    text: str
    begin: int
    end: int
    last: bool


class CompletionOutput:
    """One choice of a response.

    Attributes:
        index: of the choice. state: the generation's. num_read: tokens read so far. ended: the last part was read.
    """

    def __init__(
        self, service: Service, stop: StopConditions, state: RequestState, index: int, text: OutputText
    ) -> None:
        self.service, self.state, self.index = service, state, index
        self.num_read, self.ended = 0, False
        self._text, self._stop = text, stop

    @classmethod
    def start(
        cls,
        service: Service,
        request: GenerationRequest,
        stop: StopConditions,
        group: RequestGroup,
        prompt: list[int],
        max_tokens: int,
        index: int,
        *,
        seed: int,
        logprobs: int,
        prompt_logprobs: int,
        contract: Contract,
    ) -> Self:
        """Submit the generation of one output; `logprobs` and `prompt_logprobs` as in `Generation`."""
        text = OutputText(service.generations.text_stream(request, stop.strings))
        generation = service.generations.generate(
            request,
            prompt,
            max_tokens,
            seed,
            end_tokens=stop.all_stop_token_ids,
            stop_check=text.add if stop.strings is not None else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            contract=contract,
        )
        return cls(service, stop, group.submit(generation), index, text)

    @property
    def has_delta(self) -> bool:
        """True if there is something to read."""
        return len(self.state.generation.output) > self.num_read or (self.state.finished and not self.ended)

    def read(self) -> OutputDelta:
        """Everything since the last call."""
        begin, end, last = self.num_read, len(self.state.generation.output), self.state.finished
        text = self._text.take(self.state.generation.output, last)
        self.num_read, self.ended = end, last
        return OutputDelta(text, begin, end, last)

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why a finished output ended."""
        generation = self.state.generation
        if self._text.stop_string is not None:
            return "stop"
        return "stop" if generation.finish_reason == "stop" and generation.output else "length"

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the token of `stop_token_ids` that ended the output."""
        if self._text.stop_string is not None:
            return self._text.stop_string
        generation = self.state.generation
        if generation.finish_reason != "stop" or not generation.output:
            return None
        last = generation.output[-1]
        return last if last in self._stop.stop_token_ids else None

    def token_logprobs(self, delta: OutputDelta) -> list[TokenLogprob]:
        """The log-probabilities of a delta, in the form of chat completions."""
        generation = self.state.generation
        result: list[TokenLogprob] = []
        for i in range(delta.begin, delta.end):
            tops = [self._alternative(*pair) for pair in generation.top_logprobs[i]]
            token = self._alternative(generation.output[i], generation.token_logprobs[i])
            result.append({**token, "top_logprobs": tops})
        return result

    def _alternative(self, token: int, logprob: float) -> Alternative:
        tokenizer = self.service.inputs.tokenizer
        raw = b"" if tokenizer is None else tokenizer.token_bytes(token)
        return {"token": self.service.inputs.token_text(token), "logprob": logprob, "bytes": list(raw)}

    def prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """The log-probabilities of each prompt token and of the most likely tokens in its place, by id, in vLLM's form.

        The first entry is None.
        """
        generation = self.state.generation
        return [
            None if logprob is None else self._ranked(token, logprob, tops)
            for token, logprob, tops in zip(
                generation.prompt.tolist(),
                generation.prompt_token_logprobs,
                generation.prompt_top_logprobs,
                strict=True,
            )
        ]

    def _ranked(self, token: int, logprob: float, tops: TopLogprobs) -> dict[str, Any]:
        text = self.service.inputs.token_text
        ranked = {token: {"logprob": logprob, "rank": None, "decoded_token": text(token)}}
        for rank, (other, value) in enumerate(tops, 1):
            ranked[other] = {"logprob": value, "rank": rank, "decoded_token": text(other)}
        return {str(token_id): entry for token_id, entry in ranked.items()}


async def outputs_with_deltas(
    group: RequestGroup, outputs: list[CompletionOutput]
) -> AsyncIterator[list[CompletionOutput]]:
    """The outputs that have something to read, whenever there are any, until all have ended.

    Raises as `RequestGroup.changed`.
    """
    while not all(output.ended for output in outputs):
        await group.changed()
        if ready := [output for output in outputs if output.has_delta]:
            yield ready


def usage(prompts: list[list[int]], outputs: list[CompletionOutput]) -> Usage:
    """The token counts of a request. A prompt with several outputs counts once."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(output.state.generation.output) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
