"""The records of sessions: one of each finished session, and which session and turn each request belongs to."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from workloads.sessions import Prompt


class SessionRecord:
    """A session under way.

    Attributes:
        id: its number. start: when its first request was sent, seconds. turn: rounds sent so far.
        unanswered: requests of this round without an answer. sent: when this round was sent.
        waited: seconds of finished rounds, from the sending of a round to its last answer.
        requests, prompt_tokens, resent_tokens, resent_cached_tokens: sums over its requests.
    """

    __slots__ = (
        "id", "prompt_tokens", "requests", "resent_cached_tokens", "resent_tokens", "sent", "start", "turn",
        "unanswered", "waited",
    )  # fmt: skip

    def __init__(self, id: int, start: float) -> None:
        self.id = id
        self.start = start
        self.sent = start
        self.turn = self.unanswered = self.requests = 0
        self.prompt_tokens = self.resent_tokens = self.resent_cached_tokens = 0
        self.waited = 0.0

    def send(self, now: float, requests: int) -> None:
        """Count a round of `requests` requests that is sent now."""
        self.turn += 1
        self.sent = now
        self.unanswered = requests

    def answer(self, now: float, prompt: Prompt, cached_tokens: int) -> bool:
        """Count an answer to a prompt of which the cache supplied `cached_tokens`; whether it ends the round."""
        self.requests += 1
        self.prompt_tokens += prompt.tokens
        self.resent_tokens += prompt.resent_tokens
        self.resent_cached_tokens += min(cached_tokens, prompt.resent_tokens)
        self.unanswered -= 1
        if not self.unanswered:
            self.waited += now - self.sent
        return not self.unanswered

    def add_sub_agent(self, record: SessionRecord) -> None:
        """Count the requests of a sub-agent that has ended. Its turns and waits are not those of the session."""
        self.requests += record.requests
        self.prompt_tokens += record.prompt_tokens
        self.resent_tokens += record.resent_tokens
        self.resent_cached_tokens += record.resent_cached_tokens


class SessionLog:
    """Columns of the finished sessions, in the order in which they ended, and of all requests by id.

    Attributes:
        start, end, waited: when the first request was sent, when the last answer was complete, and how much of that
            time was spent waiting for answers, seconds.
        id, turns, requests, prompt_tokens, resent_tokens, resent_cached_tokens: see `SessionRecord`.
        session_of, turn_of: of each request by its id, the session and the number of its round, from 0.
    """

    def __init__(self, *, detail: bool) -> None:
        self.detail = detail
        self.start = array("d")
        self.end = array("d")
        self.waited = array("d")
        self.id = array("q")
        self.turns = array("q")
        self.requests = array("q")
        self.prompt_tokens = array("q")
        self.resent_tokens = array("q")
        self.resent_cached_tokens = array("q")
        self.session_of = array("q")
        self.turn_of = array("q")

    def sent(self, record: SessionRecord) -> None:
        """Note a request that is sent; ids count up from 0. Without detail nothing is kept."""
        if self.detail:
            self.session_of.append(record.id)
            self.turn_of.append(record.turn - 1)

    def add(self, record: SessionRecord, end: float) -> None:
        self.id.append(record.id)
        self.start.append(record.start)
        self.end.append(end)
        self.waited.append(record.waited)
        self.turns.append(record.turn)
        self.requests.append(record.requests)
        self.prompt_tokens.append(record.prompt_tokens)
        self.resent_tokens.append(record.resent_tokens)
        self.resent_cached_tokens.append(record.resent_cached_tokens)

    def columns_of(self, ids: Any) -> dict[str, Any]:
        """The columns `session` and `turn` of requests by their ids, shape (n,). Needs detail."""
        session, turn = np.array(self.session_of, dtype=np.int64), np.array(self.turn_of, dtype=np.int64)
        return {"session": session[ids], "turn": turn[ids]}
