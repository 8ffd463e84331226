"""A model on this machine and its engines. On a GPU, CUDA graphs are captured once for all engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from latency_models.timed_runs import ProfiledRounds, ReplayedRun
from live.clock import CLOCKS, Clock, ClockName, RanksClock, WallClock
from live.engine import Engine
from live.generation import Generation
from live.loaded_model import LoadedModel, ModelSource
from live.models.linear import Rounding
from live.speculation import NgramLookup, num_right
from live.topologies.tensor_parallel import TensorParallelModel
from live.validation.profiling import EngineProfile, ProfilingLimits
from live.validation.replay import Sessions, materialise, replay
from scenarios.engine import SchedulerPlan
from scenarios.steps import SpeculativeSpec
from scenarios.validation import LiveModelSpec, ProfilingSpec
from schedulers.speculation import AnswerDrafts
from workloads.request import Request
from workloads.sessions import Session

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
