"""Replays a workload on an engine: every request at its arrival time, by the wall or by a virtual clock.

Requests are listed beforehand, or turns of sessions, which follow their answers. They have only lengths and shared
prefixes; their token ids are made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from live.clock import Clock, WallClock
from live.device import no_garbage_collection
from live.engine import Engine
from live.generation import GREEDY, Contract, Generation, make_generation
from live.validation.profiling import EngineProfile, ProfilingResult, TimedEngine
from schedulers.batches import Batch
from schedulers.sequence import Sequence as Sequenced
from schedulers.speculation import SpeculationStats, SpeculativeEngineCore
from workloads.errors import BadInput
from workloads.request import Request
from workloads.sessions import Prompt, Round, Session

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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


TURN_STEPS = 32
"""Steps of a replay after which a profile goes on by as many. The machine's speed differs little within them, and the
first step after a turn of the other engine, which finds caches cold, is as rare for both."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A measured step: its batch, its begin and its end, seconds since the start."""

    batch: Batch
    begin: float
    end: float


@dataclass(frozen=True)
class ReplayResult:
    """A replayed workload, in seconds since the start; `noticed`: when the engine took in each of `by_arrival`.

    `followed`: of each step, whether the engine began the next one without waiting for an arrival.
    """

    generations: list[Generation]
    by_arrival: list[Generation]
    noticed: list[float]
    steps: list[TimedStep]
    followed: list[bool]
    more: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    speculation: SpeculationStats | None = None
    profiled: ProfilingResult | None = None
    scaling: ClassVar[None] = None

    @property
    def spans(self) -> list[tuple[Batch, float, float]]:
        """Every step: its batch, its begin, and its end or the begin of the next step where that follows at once."""
        return step_spans(self.steps, self.followed)

    @property
    def token_times(self) -> list[list[float]]:
        """The times of each request's output tokens, seconds since the start."""
        return [generation.times for generation in self.generations]

    def columns(self) -> dict[str, npt.NDArray[np.float64]]:
        """One entry a request: arrival, noticed, first_token, last_token (seconds since the start), output_tokens."""
        noticed = {generation.request.id: now for now, generation in zip(self.noticed, self.by_arrival, strict=True)}
        return request_columns(self.generations, [noticed[row.request.id] for row in self.generations]) | self.more


def step_spans(steps: Sequence[TimedStep], followed: Sequence[bool]) -> list[tuple[Batch, float, float]]:
    """`ReplayResult.spans` of one engine."""
    ends = [step.end for step in steps]
    for i, follows in enumerate(followed[:-1]):
        if follows:
            ends[i] = steps[i + 1].begin
    return [(step.batch, step.begin, end) for step, end in zip(steps, ends, strict=True)]


def request_columns(generations: Sequence[Generation], noticed: Sequence[float]) -> dict[str, npt.NDArray[np.float64]]:
    """Times of requests, seconds since the start, and their output tokens. `noticed`: when the engine took them in."""
    return {
        "arrival": np.array([generation.request.arrival for generation in generations]),
        "noticed": np.array(noticed),
        "first_token": np.array([generation.first_token for generation in generations]),
        "last_token": np.array([generation.last_token for generation in generations]),
        "output_tokens": np.array([float(len(generation.output)) for generation in generations]),
    }


def replay(
    engine: TimedEngine,
    requests: Sequence[Generation] | Sessions,
    clock: Clock | None = None,
    profile: EngineProfile | None = None,
) -> ReplayResult:
    """Send each request when it arrives, and step the engine until all are finished.

    Arrivals are noticed between steps, as in the simulated engine; `submitted` becomes the arrival. The clock stops
    while sessions make up a request. `profile`: of another engine, which goes on by turns of `TURN_STEPS` steps.
    """
    steps: list[TimedStep] = []
    noticed: list[float] = []
    followed: list[bool] = []
    clients = OpenLoop(requests) if isinstance(requests, Sequence) else requests
    by_arrival: list[Generation] = []
    cached: dict[int, Sequenced] = {}
    engine.keep_times = True
    engine.watch = lambda batch, begin, end: steps.append(TimedStep(batch, begin, end))
    with no_garbage_collection():
        engine.clock = clock = clock or WallClock()
        clock.start()
        while True:
            now = clock()
            if (arrival := clients.next_arrival) is not None and arrival <= now:
                with clock.paused():
                    due = clients.due(now)
                for generation in due:
                    noticed.append(now)
                    cached[generation.request.id] = engine.submit(generation)
                    generation.submitted = generation.request.arrival
                by_arrival += due
            result = engine.step()
            if result is not None:
                for generation in result.finished:
                    clients.finished(generation)
                followed.append(True)
                if profile is not None and not len(followed) % TURN_STEPS:
                    with clock.paused():
                        profile.go_on(TURN_STEPS)
            else:
                if followed:
                    followed[-1] = False
                if (arrival := clients.next_arrival) is None:
                    break
                clock.wait_until(arrival)
    engine.watch = None
    core = engine.core if isinstance(engine, Engine) else None
    stats = core.stats if isinstance(core, SpeculativeEngineCore) else None
    generations = list(requests) if isinstance(requests, Sequence) else by_arrival
    columns = clients.columns(generations)
    if columns:
        columns["cached_tokens"] = np.array([float(cached[row.request.id].num_cached_tokens) for row in generations])
    profiled = None if profile is None else profile.take()
    return ReplayResult(generations, by_arrival, noticed, steps, followed, columns, stats, profiled)
