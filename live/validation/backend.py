"""A model on this machine and its engines, and replays of workloads: every request at its arrival time.

Requests are listed beforehand, or turns of sessions, which follow their answers. They have only lengths and shared
prefixes; their token ids are made here. The clock is the wall's or a virtual one. On a GPU, CUDA graphs are captured
once for all engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from latency_models.timed_runs import ProfiledRounds, ReplayedRun, Span
from live.clock import CLOCKS, Clock, ClockName, RanksClock, WallClock
from live.device import no_garbage_collection
from live.engine import Engine
from live.generation import GREEDY, Contract, Generation, make_generation
from live.loaded_model import LoadedModel, ModelSource
from live.models.linear import Rounding
from live.speculation import NgramLookup, num_right
from live.topologies.tensor_parallel import TensorParallelModel
from live.validation.profiling import EngineProfile, ProfilingLimits, TimedEngine
from scenarios.engine import SchedulerPlan
from scenarios.steps import SpeculativeSpec
from scenarios.validation import LiveModelSpec, ProfilingSpec
from schedulers.sequence import Sequence as Sequenced
from schedulers.speculation import AnswerDrafts, SpeculativeEngineCore
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


Requests = Sequence[tuple[Request, int]] | Sequence[Session]
"""Requests, each paired with its number of output tokens, or sessions, whose rounds have not begun."""


IN_TURNS_SEED = 1001
"""Seed of a profile that takes turns with replays: other requests than those of the profile before."""


class WithoutDrafts:
    """The steps of a validation that there is nothing to do in, on a CPU without speculative decoding."""

    def measure_drafts(
        self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]
    ) -> Sequence[AnswerDrafts]:
        """None."""
        return ()

    def warm_up(self, scheduler: SchedulerPlan, requests: Requests) -> bool:
        """False: a first replay does nothing that later ones do not."""
        return False


class LiveBackend(LoadedModel):
    """One model, loaded once; engines may schedule ahead, and `in_turns` be profiled in turns with each replay.

    By the direct clock, a step of `tensor_parallel_size` processes takes the longest of their CPU times between any two
    sums, and for each sum the latency that is measured here.
    """

    def __init__(
        self, source: ModelSource, *, async_scheduling: bool = False, clock: ClockName = "wall",
        in_turns: ProfilingSpec | None = None, tensor_parallel_size: int = 1,
    ) -> None:  # fmt: skip
        start = partial(TensorParallelModel, size=tensor_parallel_size) if tensor_parallel_size > 1 else None
        super().__init__(source, async_scheduling=async_scheduling, start_ranks=start)
        single = source.device == "cpu" and source.threads == 1
        assert clock == "wall" or single, "CPU time is elapsed time on one thread only"
        assert in_turns is None or source.device == "cpu", "two engines cannot share captured graphs"
        self._clock: Callable[[], Clock] = CLOCKS[clock]
        self._description: dict[str, Any] = {}
        if isinstance(self.ranks, TensorParallelModel):
            self._description = {"tensor_parallel_size": tensor_parallel_size}
            if clock == "direct":
                group = self.ranks.group
                self._description["sum_latency"] = self.ranks.decoder.measure_latency()
                self._clock = partial(RanksClock, lambda: group.behind)
        self._in_turns = in_turns
        self._profile_in_turns: EngineProfile | None = None

    def describe(self) -> dict[str, Any]:
        """Also the ranks, and the latency of their sums, seconds."""
        return super().describe() | self._description

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfiledRounds:
        """Time steps of random requests (`live.validation.profiling`). On a GPU the same steps run untimed first."""
        limits = profiling_limits(scheduler, spec)
        if self.uses_graphs:
            EngineProfile(self.planned_engine(scheduler), limits, self.vocabulary, seed, WallClock()).run()
        return EngineProfile(self._settled(scheduler), limits, self.vocabulary, seed, self._clock()).run()

    def measure_drafts(
        self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]
    ) -> Sequence[AnswerDrafts]:
        """The outcomes of drafts at every position of answers, as much longer as a draft can be. Nothing is timed."""
        spec, longest = scheduler.speculation, self.decoder.config.max_position_embeddings
        assert spec is not None
        generations = []
        for request, answer in requests:
            length = min(answer + spec.num_speculative_tokens, longest - request.prompt_tokens)
            longer = replace(request, max_tokens=length, arrival=0.0)
            generations.append(materialise(longer, length, self.vocabulary, scheduler.config.prefix_id_tokens))
        return measure_drafts(self.planned_engine(scheduler), generations, spec)

    def warm_up(self, scheduler: SchedulerPlan, requests: Requests) -> bool:
        """Replay a workload to capture graphs of its steps. False, without a replay, where there are no graphs."""
        if self.uses_graphs:
            self.replay(scheduler, requests)
        return self.uses_graphs

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedRun:
        """Send each request to an empty engine at its time; a profile in turns goes on where it paused before."""
        clients = clients_of(requests, self.vocabulary, scheduler.config.prefix_id_tokens)
        if self._in_turns is not None and self._profile_in_turns is None:
            limits, engine = profiling_limits(scheduler, self._in_turns), self._settled(scheduler)
            self._profile_in_turns = EngineProfile(engine, limits, self.vocabulary, IN_TURNS_SEED, self._clock())
        return replay(self._settled(scheduler), clients, self._clock(), self._profile_in_turns)

    def _settled(self, scheduler: SchedulerPlan) -> Engine:
        """An engine to be timed: it captures no more graphs, which would pause it."""
        engine = self.planned_engine(scheduler)
        engine.executor.freeze_graphs()
        return engine


def profiling_limits(scheduler: SchedulerPlan, spec: ProfilingSpec) -> ProfilingLimits:
    """The limits of a profile that a scenario states."""
    return ProfilingLimits(
        spec.max_prompt_tokens,
        spec.max_output_tokens,
        scheduler.config.max_num_seqs,
        spec.rounds,
        spec.max_steps,
        spec.resent,
    )


def clients_of(requests: Requests, vocabulary: int, id_tokens: int) -> Sequence[Generation] | Sessions:
    """The clients that send requests or sessions. `id_tokens`: prompt tokens that one prefix id stands for."""
    sessions = [session for session in requests if isinstance(session, Session)]
    return Sessions(sessions, vocabulary, id_tokens) if sessions else generations_of(requests, vocabulary, id_tokens)


def generations_of(requests: Requests, vocabulary: int, id_tokens: int) -> list[Generation]:
    """The generations of requests that are in no session."""
    return [materialise(*request, vocabulary, id_tokens) for request in requests if not isinstance(request, Session)]


def model_source(spec: LiveModelSpec, base: Path, seed: int, device: str = "cpu") -> ModelSource:
    """The model of a scenario; relative paths start from `base`."""
    rounding = Rounding(**spec.quantise.model_dump()) if spec.quantise else None
    return ModelSource(base / spec.path, spec.weights == "random", spec.dtype, device, spec.threads, seed, rounding)


def measure_drafts(engine: Engine, generations: Sequence[Generation], spec: SpeculativeSpec) -> list[AnswerDrafts]:
    """Answer all generations, and find the outcomes of n-gram drafts at every position of each answer."""
    for generation in generations:
        engine.submit(generation)
    while engine.step() is not None:
        pass
    return [drafts_of(generation, spec) for generation in generations]


def drafts_of(generation: Generation, spec: SpeculativeSpec) -> AnswerDrafts:
    """The outcomes behind which the answer is as long as a draft; position 0, without decodes, has none."""
    size = spec.num_speculative_tokens
    lookup = NgramLookup(spec.prompt_lookup_min, spec.prompt_lookup_max)
    lookup.extend(generation.prompt.tolist())
    output, drafted, right = generation.output, [0], [0]
    for position in range(1, len(output) - size + 1):
        lookup.extend(output[position - 1 : position])
        draft = lookup.propose(size)
        drafted.append(len(draft))
        right.append(num_right(draft, output[position : position + len(draft)]))
    return AnswerDrafts(drafted, right)
