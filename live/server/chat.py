"""/v1/chat/completions: a chat goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from live.server.answers import Answer, Piece, news, usage
from live.server.errors import bad_request
from live.server.exchange import Exchange, event
from live.server.protocol import ChatRequest
from live.server.replies import Chat, ChatChoice, ChatLogprobs
from live.server.service import Service, identifier, now
from live.server.worker import Group


class Chatting:
    """One request under way."""

    def __init__(self, service: Service, asked: ChatRequest) -> None:
        self.service, self.asked = service, asked
        service.check_generating(asked)
        if asked.top_logprobs is not None and not asked.logprobs:
            raise bad_request("top_logprobs", "expected logprobs to be true")
        self.prompt = service.rendered(asked)
        self.most = self._most()
        service.check_room(asked.n or 1)
        self.answers: list[Answer] = []
        self.id, self.created = identifier("chatcmpl"), now()

    def _most(self) -> int:
        """What the client allows, else all that there is room for."""
        asked = self.asked
        if asked.max_completion_tokens is not None:
            return self.service.most(self.prompt, asked.max_completion_tokens, "max_completion_tokens")
        if asked.max_tokens is not None:
            return self.service.most(self.prompt, asked.max_tokens, "max_tokens")
        return self.service.most(self.prompt, max(self.service.contexts - len(self.prompt), 1), "messages")

    def submit(self, group: Group) -> None:
        """The chat, n times."""
        asked = self.asked
        top = (asked.top_logprobs or 0) if asked.logprobs else -1
        prompt_top = -1 if asked.prompt_logprobs is None else asked.prompt_logprobs
        seed = self.service.seed(asked)
        for i in range(asked.n or 1):
            begun = Answer.begin(
                self.service, asked, group, self.prompt, self.most, i, seed=seed + i, top=top, prompt_top=prompt_top
            )
            self.answers.append(begun)

    def choice(self, answer: Answer) -> ChatChoice:
        """A whole answer."""
        piece = answer.read()
        choice: ChatChoice = {
            "index": answer.index,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": self._logprobs(answer, piece),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.asked.return_token_ids:
            choice["token_ids"] = answer.ticket.generation.output
        return choice

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A piece of the stream."""
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.service.name,
            "choices": choices,
        }

    def delta(self, answer: Answer) -> list[dict[str, Any]]:
        """What is new of an answer, as choices; who speaks is said first."""
        choices = [_choice(answer, {"role": "assistant", "content": ""})] if not answer.seen else []
        piece = answer.read()
        choice = _choice(answer, {"content": piece.text})
        choice["logprobs"] = self._logprobs(answer, piece)
        if piece.last:
            choice["finish_reason"], choice["stop_reason"] = answer.finish_reason, answer.stop_reason
        if self.asked.return_token_ids:
            choice["token_ids"] = answer.ticket.generation.output[piece.begin : piece.end]
        return [*choices, choice]

    def _logprobs(self, answer: Answer, piece: Piece) -> ChatLogprobs | None:
        return {"content": answer.token_logprobs(piece), "refusal": None} if self.asked.logprobs else None


async def chat(service: Service, asked: ChatRequest, exchange: Exchange) -> Chat | AsyncIterator[bytes]:
    """Answer at once, or in pieces."""
    chatting = Chatting(service, asked)
    if asked.stream:
        return _stream(chatting, exchange)
    with service.group(exchange) as group:
        chatting.submit(group)
        await group.done()
    document: Chat = {
        "id": chatting.id,
        "object": "chat.completion",
        "created": chatting.created,
        "model": service.name,
        "choices": [chatting.choice(answer) for answer in chatting.answers],
        "usage": usage([chatting.prompt], chatting.answers),
    }
    if asked.prompt_logprobs is not None:
        document["prompt_logprobs"] = chatting.answers[0].prompt_logprobs()
    if asked.return_token_ids:
        document["prompt_token_ids"] = chatting.prompt
    return document


async def _stream(chatting: Chatting, exchange: Exchange) -> AsyncIterator[bytes]:
    counted = chatting.asked.counts_usage
    extra = {"usage": None} if counted else {}
    with chatting.service.group(exchange) as group:
        chatting.submit(group)
        async for answers in news(group, chatting.answers):
            choices = [choice for answer in answers for choice in chatting.delta(answer)]
            yield b"".join([event({**chatting.chunk([choice]), **extra}) for choice in choices])
    if counted:
        yield event({**chatting.chunk([]), "usage": usage([chatting.prompt], chatting.answers)})


def _choice(answer: Answer, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": None}
