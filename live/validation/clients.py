"""The clients of a replay: requests that are listed beforehand, and sessions, whose turns follow their answers.

Requests have only lengths and shared prefixes; their token ids are made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from kernels.sampling import SamplingParams
from live.generation import Contract, Generation, make_generation
from workloads.errors import BadInput
from workloads.request import Request
from workloads.sessions import Prompt, Round, Session

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

GREEDY = SamplingParams(temperature=0.0)


def materialise(request: Request, answer: int, vocabulary: int, id_tokens: int) -> Generation:
    """A generation with random tokens, whose prompt shares blocks with just the requests that share its prefix ids."""
    prompt = prefix_tokens(request.prefix_blocks, (request.id,), request.prompt_tokens, vocabulary, id_tokens)
    return make_generation(
        request.id,
        prompt,
        answer if request.max_tokens else 0,
        sampling_params=GREEDY,
        block_size=id_tokens,
        task=request.task,
        model=request.model,
        contract=Contract(request.arrival, request.priority, request.tenant, request.service_class, request.ttft_goal),
    )


def prefix_tokens(
    ids: Sequence[int], key: Sequence[int], tokens: int, vocabulary: int, id_tokens: int
) -> npt.NDArray[np.int64]:
    """A prompt of `tokens` random tokens: those of a block depend on its id, and the rest on `key`."""
    parts = [np.random.default_rng([7, block]).integers(vocabulary, size=id_tokens) for block in ids]
    new_tokens = max(tokens - id_tokens * len(parts), 0)
    parts.append(np.random.default_rng([11, *key]).integers(vocabulary, size=new_tokens))
    prompt: npt.NDArray[np.int64] = np.concatenate(parts)[:tokens]
    return prompt


class OpenLoop:
    """Requests that arrive at their times, whatever is answered."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._waiting = deque(sorted(generations, key=lambda generation: generation.request.arrival))

    def due(self, now: float) -> list[Generation]:
        """Requests that arrive until `now` and were not taken before, in order of arrival."""
        due: list[Generation] = []
        while self._waiting and self._waiting[0].request.arrival <= now:
            due.append(self._waiting.popleft())
        return due

    @property
    def next_arrival(self) -> float | None:
        """The time of the next arrival; None if there is none before a further answer."""
        return self._waiting[0].request.arrival if self._waiting else None

    def finished(self, generation: Generation) -> None:
        """Take note of an answer."""

    def columns(self, generations: Sequence[Generation]) -> dict[str, Floats]:
        """Columns that these clients add to those of the requests: none."""
        return {}


@dataclass
class _SessionState:
    """A session under way: its text, the round that is next or unanswered, and the request that it goes on from."""

    session: Session
    rounds: Iterator[Round]
    round: Round
    text: Tokens
    turn: int = 0
    unanswered: int = 0
    first: Generation | None = None


class Sessions:
    """Sessions that begin at their arrival times; each round follows the answers of the one before by its pause.

    A prompt repeats the real text of the earlier prompt and its answer, and goes on with random tokens. Blocks have the
    workload's ids, so that the scheduler shares what it shares in a simulation.
    """

    def __init__(self, sessions: Sequence[Session], vocabulary: int, id_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._id_tokens = id_tokens
        self._ids = count()
        self._order = count()
        self._pending: list[tuple[float, int, _SessionState]] = []
        self._states: dict[int, _SessionState] = {}  # by the ids of unanswered requests
        self._of_request: dict[int, tuple[int, int, Prompt]] = {}  # session, turn and prompt, by id
        for session in sessions:
            rounds = iter(session.rounds)
            state = _SessionState(session, rounds, next(rounds), np.empty(0, dtype=np.int64))
            heappush(self._pending, (session.arrival, next(self._order), state))

    def due(self, now: float) -> list[Generation]:
        due: list[Generation] = []
        while self._pending and self._pending[0][0] <= now:
            time, _, state = heappop(self._pending)
            due += self._send(state, time)
        return due

    @property
    def next_arrival(self) -> float | None:
        return self._pending[0][0] if self._pending else None

    def finished(self, generation: Generation) -> None:
        """Take note of an answer: the last one of a round brings the next round."""
        state = self._states.pop(generation.request.id)
        state.unanswered -= 1
        if state.unanswered:
            return
        following = next(state.rounds, None)
        if following is None:
            return
        assert state.first is not None
        state.text = np.concatenate((state.first.prompt, np.array(state.first.output, dtype=np.int64)))
        state.round = following
        time = max(generation.last_token + following.pause, following.not_before)
        heappush(self._pending, (time, next(self._order), state))

    def columns(self, generations: Sequence[Generation]) -> dict[str, Floats]:
        """The columns session, turn, prompt_tokens and resent_tokens."""
        rows = [self._of_request[generation.request.id] for generation in generations]
        return {
            "session": np.array([float(session) for session, _, _ in rows]),
            "turn": np.array([float(turn) for _, turn, _ in rows]),
            "prompt_tokens": np.array([float(prompt.tokens) for _, _, prompt in rows]),
            "resent_tokens": np.array([float(prompt.resent_tokens) for _, _, prompt in rows]),
        }

    def _send(self, state: _SessionState, time: float) -> list[Generation]:
        if state.round.agents:
            raise BadInput("expected sessions without sub-agents, which only a simulation runs", field="workload.trace")
        generations = []
        for branch, prompt in enumerate(state.round.prompts):
            number = next(self._ids)
            request = replace(state.session.request(prompt, number, time), max_tokens=prompt.answer_tokens)
            generations.append(Generation(request, self._tokens(state, prompt, branch), GREEDY))
            self._states[number], self._of_request[number] = state, (state.session.id, state.turn, prompt)
        state.turn += 1
        state.unanswered = len(generations)
        state.first = generations[0]
        return generations

    def _tokens(self, state: _SessionState, prompt: Prompt, branch: int) -> Tokens:
        """The text so far, as far as the prompt repeats it, and new tokens."""
        resent = min(prompt.resent_tokens, len(state.text))
        blocks = prompt.prefix_blocks[: prompt.tokens // self._id_tokens]
        key = state.session.id, state.turn, branch
        tokens = prefix_tokens(blocks, key, prompt.tokens, self._vocabulary, self._id_tokens)
        tokens[:resent] = state.text[:resent]
        return tokens
