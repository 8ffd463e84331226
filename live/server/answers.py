"""An answer as it is read off its ticket, piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self

from live.generation import Likely
from live.server.protocol import Generating
from live.server.replies import Alternative, FinishReason, TokenLogprob, Usage
from live.server.service import Service
from live.server.tickets import Ticket
from live.server.worker import Group
from live.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer: its text, and where the tokens lie that it is of. `last`: no more will come."""

    text: str
    begin: int
    end: int
    last: bool


class Spoken:
    """The text of an answer, made once for two who listen: the engine for a stop string, the reply for what to send.

    Args:
        stream: makes it; None: there is no tokenizer and no text.
    """

    def __init__(self, stream: TextStream | None) -> None:
        self._stream, self._heard, self._text = stream, 0, ""

    @property
    def stopped(self) -> str | None:
        """The stop string that it ended with."""
        return None if self._stream is None else self._stream.stopped

    def hear(self, token: int) -> bool:
        """Take the next token; whether the text ends with it."""
        assert self._stream is not None
        self._text += self._stream.push(token)
        self._heard += 1
        return self._stream.stopped is not None

    def take(self, output: list[int], last: bool) -> str:
        """The text that is certain and has not been taken, of all tokens so far. `last`: there will be no more."""
        if self._stream is None:
            return ""
        for token in output[self._heard :]:
            self.hear(token)
        taken = self._text + (self._stream.finish() if last else "")
        self._text = ""
        return taken


class Answer:
    """One choice of a reply.

    Attributes:
        index: of the choice. ticket: what it is read off. seen: tokens read so far.
    """

    def __init__(self, service: Service, asked: Generating, ticket: Ticket, index: int, spoken: Spoken) -> None:
        self.service, self.ticket, self.index, self.seen = service, ticket, index, 0
        self.told_last = False
        self._spoken = spoken
        self._stop_tokens = frozenset(asked.stop_token_ids or ())

    @classmethod
    def begin(
        cls, service: Service, asked: Generating, group: Group, prompt: list[int], most: int, index: int,
        *, seed: int, top: int, prompt_top: int,
    ) -> Self:  # fmt: skip
        """Have the answer to a prompt run; arguments as `Service.generation` has them."""
        spoken = Spoken(service.text_stream(asked))
        until = spoken.hear if asked.stops else None
        made = service.generation(asked, prompt, most, seed, until=until, top=top, prompt_top=prompt_top)
        return cls(service, asked, group.submit(made), index, spoken)

    @property
    def has_news(self) -> bool:
        """Whether there is a piece to read."""
        return len(self.ticket.generation.output) > self.seen or (self.ticket.over and not self.told_last)

    def read(self) -> Piece:
        """All that has come since the last call."""
        begin, end, last = self.seen, len(self.ticket.generation.output), self.ticket.over
        text = self._spoken.take(self.ticket.generation.output, last)
        self.seen, self.told_last = end, last
        return Piece(text, begin, end, last)

    @property
    def finish_reason(self) -> FinishReason:
        """Of an answer that is over."""
        generation = self.ticket.generation
        if self._spoken.stopped is not None:
            return "stop"
        return "stop" if generation.ending == "stop" and generation.output else "length"

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the token of `stop_token_ids` that ended it."""
        if self._spoken.stopped is not None:
            return self._spoken.stopped
        generation = self.ticket.generation
        ended = generation.ending == "stop" and generation.output and generation.output[-1] in self._stop_tokens
        return generation.output[-1] if ended else None

    def token_logprobs(self, piece: Piece) -> list[TokenLogprob]:
        """Of a piece, as chats tell them."""
        generation = self.ticket.generation
        told: list[TokenLogprob] = []
        for i in range(piece.begin, piece.end):
            tops = [self._alternative(*pair) for pair in generation.tops[i]]
            told.append({**self._alternative(generation.output[i], generation.logprobs[i]), "top_logprobs": tops})
        return told

    def _alternative(self, token: int, logprob: float) -> Alternative:
        tokenizer = self.service.tokenizer
        raw = b"" if tokenizer is None else tokenizer.piece_bytes(token)
        return {"token": self.service.piece(token), "logprob": logprob, "bytes": list(raw)}

    def prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """Of each prompt token, as vLLM tells them: the token's and the likeliest, by id; of the first, nothing."""
        generation = self.ticket.generation
        told: list[dict[str, Any] | None] = []
        for token, logprob, tops in zip(
            generation.prompt.tolist(), generation.prompt_logprobs, generation.prompt_tops, strict=True
        ):
            told.append(None if logprob is None else self._ranked(token, logprob, tops))
        return told

    def _ranked(self, token: int, logprob: float, tops: Likely) -> dict[str, Any]:
        ranked = {token: {"logprob": logprob, "rank": None, "decoded_token": self.service.piece(token)}}
        for rank, (other, value) in enumerate(tops, 1):
            ranked[other] = {"logprob": value, "rank": rank, "decoded_token": self.service.piece(other)}
        return {str(each): told for each, told in ranked.items()}


async def news(group: Group, answers: list[Answer]) -> AsyncIterator[list[Answer]]:
    """Those with a piece to read, whenever there are any, until all are read to the end. Raises as `Group.news`."""
    while not all(answer.told_last for answer in answers):
        await group.news()
        if told := [answer for answer in answers if answer.has_news]:
            yield told


def usage(prompts: list[list[int]], answers: list[Answer]) -> Usage:
    """Tokens of a request: a prompt with several answers counts once."""
    asked, given = sum(map(len, prompts)), sum(len(answer.ticket.generation.output) for answer in answers)
    return {"prompt_tokens": asked, "completion_tokens": given, "total_tokens": asked + given}
