"""Replays a workload on an engine: every request at its arrival time, by the wall or by a virtual clock.

Requests are listed beforehand, or turns of sessions, which follow their answers. They have only lengths and shared
prefixes; their token ids are made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np
import numpy.typing as npt

from latency_models.timed_runs import ReplayedRun, Span
from live.clock import Clock, WallClock
from live.device import no_garbage_collection
from live.engine import Engine
from live.generation import GREEDY, Contract, Generation, make_generation
from live.validation.profiling import EngineProfile, TimedEngine
from schedulers.sequence import Sequence as Sequenced
from schedulers.speculation import SpeculativeEngineCore
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
        requests = [self._of_request[generation.request.id] for generation in generations]
        rows = [(session, turn, prompt.tokens, prompt.resent_tokens) for session, turn, prompt in requests]
        columns = np.array(rows, dtype=np.float64).T
        return dict(zip(("session", "turn", "prompt_tokens", "resent_tokens"), columns, strict=True))

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


def step_spans(steps: Sequence[Span], followed: Sequence[bool]) -> list[Span]:
    """An engine's steps; those that are `followed` at once by the next end where it begins."""
    ends = [end for _, _, end in steps]
    for i, follows in enumerate(followed[:-1]):
        if follows:
            ends[i] = steps[i + 1][1]
    return [(batch, begin, end) for (batch, begin, _), end in zip(steps, ends, strict=True)]


def replayed_run(generations: Sequence[Generation], noticed: Sequence[float], spans: Sequence[Span]) -> ReplayedRun:
    """A run whose requests have their times. `noticed`: when the engine took in each."""
    columns = {
        "arrival": [generation.request.arrival for generation in generations],
        "noticed": noticed,
        "first_token": [generation.first_token for generation in generations],
        "last_token": [generation.last_token for generation in generations],
        "output_tokens": [len(generation.output) for generation in generations],
    }
    requests = {name: np.array(values, dtype=np.float64) for name, values in columns.items()}
    return ReplayedRun(requests, [generation.times for generation in generations], spans)


def replay(
    engine: TimedEngine,
    requests: Sequence[Generation] | Sessions,
    clock: Clock | None = None,
    profile: EngineProfile | None = None,
) -> ReplayedRun:
    """Send each request when it arrives, and step the engine until all are finished.

    Arrivals are noticed between steps, as in the simulated engine; `submitted` becomes the arrival. The clock stops
    while sessions make up a request. `profile`: of another engine, which goes on by turns of `TURN_STEPS` steps.
    """
    steps: list[Span] = []
    followed: list[bool] = []
    clients = OpenLoop(requests) if isinstance(requests, Sequence) else requests
    noticed: dict[int, float] = {}
    by_arrival: list[Generation] = []
    sequences: dict[int, Sequenced] = {}
    engine.keep_times = True
    engine.watch = lambda batch, begin, end: steps.append((batch, begin, end))
    with no_garbage_collection():
        engine.clock = clock = clock or WallClock()
        clock.start()
        while True:
            now = clock()
            if (arrival := clients.next_arrival) is not None and arrival <= now:
                with clock.paused():
                    due = clients.due(now)
                for generation in due:
                    noticed[generation.request.id] = now
                    sequences[generation.request.id] = engine.submit(generation)
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
    cached = {request_id: sequence.num_cached_tokens for request_id, sequence in sequences.items()}
    run = answered_run(requests, by_arrival, noticed, cached, step_spans(steps, followed))
    return replace(run, speculation=stats, profiled=None if profile is None else profile.take())


def answered_run(
    requests: Sequence[Generation] | Sessions, by_arrival: Sequence[Generation], noticed: Mapping[int, float],
    cached: Mapping[int, int], spans: Sequence[Span],
) -> ReplayedRun:  # fmt: skip
    """A run of listed requests in their order, or of sessions with their columns. `cached`: prompt tokens, by id."""
    if isinstance(requests, Sequence):
        return replayed_run(requests, [noticed[row.request.id] for row in requests], spans)
    run = replayed_run(by_arrival, [noticed[row.request.id] for row in by_arrival], spans)
    tokens = np.array([float(cached[row.request.id]) for row in by_arrival])
    columns = {**run.requests, **requests.columns(by_arrival), "cached_tokens": tokens}
    return replace(run, requests=columns)
