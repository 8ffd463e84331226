"""The clients of a replay: requests that are listed beforehand, and sessions, whose turns follow their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

from live.generation import Generation
from live.validation.prompts import GREEDY, prefix_tokens
from workloads.sessions import Prompt, Round, Session

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Clients(Protocol):
    """Senders of requests."""

    def due(self, now: float) -> list[Generation]:
        """Requests that arrive until `now` and were not taken before, in order of arrival."""
        ...

    @property
    def next_arrival(self) -> float | None:
        """When the next request arrives; None if none does before a further answer."""
        ...

    def finished(self, generation: Generation) -> None:
        """Take note of an answer."""
        ...

    def columns(self, sent: Sequence[Generation]) -> dict[str, Floats]:
        """Columns that these clients add to those of the requests, in the order given."""
        ...


class OpenLoop:
    """Requests that arrive at their times, whatever is answered."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._waiting = deque(sorted(generations, key=lambda generation: generation.request.arrival))

    def due(self, now: float) -> list[Generation]:
        """See `Clients.due`."""
        found: list[Generation] = []
        while self._waiting and self._waiting[0].request.arrival <= now:
            found.append(self._waiting.popleft())
        return found

    @property
    def next_arrival(self) -> float | None:
        """See `Clients.next_arrival`."""
        return self._waiting[0].request.arrival if self._waiting else None

    def finished(self, generation: Generation) -> None:
        """See `Clients.finished`."""

    def columns(self, sent: Sequence[Generation]) -> dict[str, Floats]:
        """See `Clients.columns`: none."""
        return {}


@dataclass
class _Held:
    """A session under way.

    Attributes:
        said: tokens of its latest prompt and answer. turn: rounds sent so far.
        round: the next one, or the one that is being answered. unanswered: requests of it without an answer.
        first: the request of the round that the conversation goes on from.
    """

    session: Session
    rounds: Iterator[Round]
    round: Round
    said: Tokens
    turn: int = 0
    unanswered: int = 0
    first: Generation | None = None


class Sessions:
    """Sessions that begin at their arrival times; each round follows the answers of the one before by its pause.

    A prompt repeats the real text of the earlier prompt and its answer, and goes on with random tokens. Blocks have the
    ids that the workload gives them, so that the scheduler shares what it shares in a simulation.

    Args:
        vocabulary: number of token ids. id_tokens: tokens that one prefix id stands for.
    """

    def __init__(self, sessions: Sequence[Session], vocabulary: int, id_tokens: int) -> None:
        self._vocabulary, self._id_tokens = vocabulary, id_tokens
        self._ids, self._order = count(), count()
        self._coming: list[tuple[float, int, _Held]] = []
        self._held: dict[int, _Held] = {}  # by the ids of unanswered requests
        self._of_request: dict[int, tuple[int, int, Prompt]] = {}  # session, turn and prompt, by id
        for session in sessions:
            rounds = iter(session.rounds)
            held = _Held(session, rounds, next(rounds), np.empty(0, dtype=np.int64))
            heappush(self._coming, (session.arrival, next(self._order), held))

    def due(self, now: float) -> list[Generation]:
        """See `Clients.due`."""
        found: list[Generation] = []
        while self._coming and self._coming[0][0] <= now:
            time, _, held = heappop(self._coming)
            found += self._send(held, time)
        return found

    @property
    def next_arrival(self) -> float | None:
        """See `Clients.next_arrival`."""
        return self._coming[0][0] if self._coming else None

    def finished(self, generation: Generation) -> None:
        """See `Clients.finished`: the last answer of a round brings the next one."""
        held = self._held.pop(generation.request.id)
        held.unanswered -= 1
        if held.unanswered:
            return
        following = next(held.rounds, None)
        if following is None:
            return
        assert held.first is not None
        held.said = np.concatenate((held.first.prompt, np.array(held.first.output, dtype=np.int64)))
        held.round = following
        time = max(generation.last_token + following.pause, following.not_before)
        heappush(self._coming, (time, next(self._order), held))

    def columns(self, sent: Sequence[Generation]) -> dict[str, Floats]:
        """See `Clients.columns`: session, turn, prompt_tokens and resent_tokens."""
        rows = [self._of_request[each.request.id] for each in sent]
        return {
            "session": np.array([float(session) for session, _, _ in rows]),
            "turn": np.array([float(turn) for _, turn, _ in rows]),
            "prompt_tokens": np.array([float(prompt.tokens) for _, _, prompt in rows]),
            "resent_tokens": np.array([float(prompt.resent_tokens) for _, _, prompt in rows]),
        }

    def _send(self, held: _Held, time: float) -> list[Generation]:
        """The requests of a session's round."""
        generations = []
        for branch, prompt in enumerate(held.round.prompts):
            number = next(self._ids)
            request = replace(held.session.request(prompt, number, time), max_tokens=prompt.answer_tokens)
            generations.append(Generation(request, self._tokens(held, prompt, branch), GREEDY))
            self._held[number], self._of_request[number] = held, (held.session.id, held.turn, prompt)
        held.turn += 1
        held.unanswered, held.first = len(generations), generations[0]
        return generations

    def _tokens(self, held: _Held, prompt: Prompt, branch: int) -> Tokens:
        """The text so far, as far as the prompt repeats it, and new tokens."""
        resent = min(prompt.resent_tokens, len(held.said))
        whole = prompt.prefix_blocks[: prompt.tokens // self._id_tokens]
        key = held.session.id, held.turn, branch
        made = prefix_tokens(whole, key, prompt.tokens, self._vocabulary, self._id_tokens)
        made[:resent] = held.said[:resent]
        return made
