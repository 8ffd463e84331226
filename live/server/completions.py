"""/v1/completions: texts or token ids go on."""

from __future__ import annotations

from collections.abc import AsyncIterator

from live.server.answers import Answer, Piece, news, usage
from live.server.exchange import Exchange, event
from live.server.protocol import CompletionRequest
from live.server.replies import Completion, CompletionChoice, CompletionLogprobs
from live.server.service import Service, identifier, now
from live.server.worker import Group

DEFAULT_TOKENS = 16
"""OpenAI's, and vLLM's."""


class Completing:
    """One request under way."""

    def __init__(self, service: Service, asked: CompletionRequest) -> None:
        self.service, self.asked = service, asked
        service.check_generating(asked)
        self.prompts = service.prompts(asked.prompt, "prompt", asked.add_special_tokens is not False)
        most = DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens
        self.most = [service.most(prompt, most, "max_tokens") for prompt in self.prompts]
        self.each = asked.n or 1
        service.check_room(len(self.prompts) * self.each)
        self.answers: list[Answer] = []
        self.offsets: list[int] = []
        self.id, self.created = identifier("cmpl"), now()

    def submit(self, group: Group) -> None:
        """All prompts, so many times each."""
        asked = self.asked
        top = -1 if asked.logprobs is None else asked.logprobs
        prompt_top = max(-1 if asked.prompt_logprobs is None else asked.prompt_logprobs, top if asked.echo else -1)
        seed = self.service.seed(asked)
        for prompt, most in zip(self.prompts, self.most, strict=True):
            for i in range(self.each):
                begun = Answer.begin(
                    self.service, asked, group, prompt, most, len(self.answers),
                    seed=seed + i, top=top, prompt_top=prompt_top,
                )  # fmt: skip
                self.answers.append(begun)
                self.offsets.append(0)

    def document(self, choices: list[CompletionChoice]) -> Completion:
        """A reply with these choices."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.name,
            "choices": choices,
        }

    def choice(self, answer: Answer) -> CompletionChoice:
        """What is new of an answer: in a stream a piece, else all of it. With the first comes what is of the prompt."""
        asked, first = self.asked, not answer.seen
        piece = answer.read()
        echoed = bool(asked.echo) and first
        choice: CompletionChoice = {
            "index": answer.index,
            "text": self._echo(answer) + piece.text if echoed else piece.text,
            "logprobs": None if asked.logprobs is None else self._logprobs(answer, piece, echoed),
            "finish_reason": answer.finish_reason if piece.last else None,
            "stop_reason": answer.stop_reason if piece.last else None,
        }
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answer.prompt_logprobs()
        if asked.return_token_ids or self.service.tokenizer is None:
            choice["token_ids"] = answer.ticket.generation.output[piece.begin : piece.end]
            if first:
                choice["prompt_token_ids"] = self._prompt(answer)
        return choice

    def _prompt(self, answer: Answer) -> list[int]:
        return self.prompts[answer.index // self.each]

    def _echo(self, answer: Answer) -> str:
        given = self.asked.prompt
        if isinstance(given, str):
            return given
        text = given[answer.index // self.each]
        if isinstance(text, str):
            return text
        tokenizer = self.service.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self._prompt(answer), skip_special=False)

    def _logprobs(self, answer: Answer, piece: Piece, echoed: bool) -> CompletionLogprobs:
        generation, wanted = answer.ticket.generation, self.asked.logprobs or 0
        tokens: list[int] = generation.output[piece.begin : piece.end]
        values: list[float | None] = [*generation.logprobs[piece.begin : piece.end]]
        tops = generation.tops[piece.begin : piece.end]
        if echoed:
            tokens = self._prompt(answer) + tokens
            values = generation.prompt_logprobs + values
            tops = [each[:wanted] for each in generation.prompt_tops] + tops
        pieces = [self.service.piece(token) for token in tokens]
        told: CompletionLogprobs = {"tokens": pieces, "token_logprobs": values, "top_logprobs": [], "text_offset": []}
        for text, value, likely in zip(pieces, values, tops, strict=True):
            told["text_offset"].append(self.offsets[answer.index])
            self.offsets[answer.index] += len(text)
            names = {self.service.piece(token): each for token, each in reversed(likely)}  # of two alike the likelier
            told["top_logprobs"].append(None if value is None else {**names, text: value})
        return told


async def complete(service: Service, asked: CompletionRequest, exchange: Exchange) -> Completion | AsyncIterator[bytes]:
    """Answer at once, or in pieces."""
    completing = Completing(service, asked)
    if asked.stream:
        return _stream(completing, exchange)
    with service.group(exchange) as group:
        completing.submit(group)
        await group.done()
    document = completing.document([completing.choice(answer) for answer in completing.answers])
    document["usage"] = usage(completing.prompts, completing.answers)
    return document


async def _stream(completing: Completing, exchange: Exchange) -> AsyncIterator[bytes]:
    counted = completing.asked.counts_usage
    extra = {"usage": None} if counted else {}
    with completing.service.group(exchange) as group:
        completing.submit(group)
        async for answers in news(group, completing.answers):
            choices = [completing.choice(answer) for answer in answers]
            yield b"".join([event({**completing.document([choice]), **extra}) for choice in choices])
    if counted:
        yield event({**completing.document([]), "usage": usage(completing.prompts, completing.answers)})
