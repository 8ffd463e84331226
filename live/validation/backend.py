"""A model on this machine and its engines. On a GPU, CUDA graphs are captured once for all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from live.clock import CLOCKS, ClockName
from live.device import device_name, versions
from live.engine import Engine
from live.generation import Generation
from live.loaded_model import LoadedModel
from live.validation.clients import Sessions
from live.validation.draft_outcomes import measure_drafts
from live.validation.profiling import ProfilingLimits, ProfilingResult, profile
from live.validation.prompts import materialise
from live.validation.replay import ReplayResult, replay
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec
from schedulers.speculation import AnswerDrafts
from workloads.request import Request
from workloads.sessions import Session

Requests = Sequence[tuple[Request, int]] | Sequence[Session]
"""Requests, each paired with its number of output tokens, or sessions, whose rounds have not begun."""


class LiveBackend(LoadedModel):
    """One model, loaded once.

    Args:
        path: a Hugging Face directory, or with `random` weights a config.json.
        threads: CPU threads of one operation.
        quantise: fields of `Rounding`, to round linear layers; None: no rounding.
        async_scheduling: engines schedule a step while the step before it still runs.
        clock: the clock of timed runs (`live.clock`).

    Raises:
        BadInput: a model that cannot be read or does not fit, a device that does not exist, or too many threads.
    """

    def __init__(
        self, path: Path, *, random: bool, dtype: str, device: str, threads: int, seed: int,
        quantise: Mapping[str, Any] | None = None, async_scheduling: bool = False,
        clock: ClockName = "wall",
    ) -> None:  # fmt: skip
        super().__init__(
            path, random=random, dtype=dtype, device=device, threads=threads, seed=seed, quantise=quantise,
            async_scheduling=async_scheduling,
        )  # fmt: skip
        assert clock == "wall" or (device == "cpu" and threads == 1), "CPU time is elapsed time on one thread only"
        self._clock = CLOCKS[clock]

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfilingResult:
        """Time steps of random requests (`live.validation.profiling`). On a GPU the same steps run untimed first.

        Raises:
            ValueError: lengths that the engine refuses.
        """
        limits = ProfilingLimits(
            spec.max_prompt_tokens,
            spec.max_output_tokens,
            scheduler.config.max_num_seqs,
            spec.rounds,
            spec.max_steps,
            spec.resent,
        )
        if self.uses_graphs:
            profile(lambda: self.planned_engine(scheduler), limits, self.vocabulary, seed)
        return profile(lambda: self._settled(scheduler), limits, self.vocabulary, seed, self._clock())

    def measure_drafts(
        self, scheduler: SchedulerPlan, requests: Sequence[tuple[Request, int]]
    ) -> Sequence[AnswerDrafts]:
        """Answer requests, and find the outcomes of drafts at every position of their answers. Nothing is timed.

        Answers are as much longer as a draft can be, where the model's context allows it.

        Raises:
            ValueError: a request that the engine refuses.
        """
        spec, longest = scheduler.speculation, self.decoder.config.max_position_embeddings
        assert spec is not None
        generations = []
        for request, answer in requests:
            length = min(answer + spec.num_speculative_tokens, longest - request.prompt_tokens)
            longer = replace(request, max_tokens=length, arrival=0.0)
            generations.append(materialise(longer, length, self.vocabulary, scheduler.config.prefix_id_tokens))
        return measure_drafts(self.planned_engine(scheduler), generations, spec)

    def warm_up(self, scheduler: SchedulerPlan, requests: Requests) -> bool:
        """Replay a workload to capture graphs of its steps. False, without a replay, where there are no graphs.

        Raises:
            ValueError: as `replay`.
        """
        if self.uses_graphs:
            self.replay(scheduler, requests)
        return self.uses_graphs

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayResult:
        """Send each request to an empty engine at its arrival time, and turns of sessions after their answers.

        Raises:
            ValueError: a request that the engine refuses.
        """
        size = scheduler.config.prefix_id_tokens
        listed = [each for each in requests if not isinstance(each, Session)]
        sessions = [each for each in requests if isinstance(each, Session)]
        clients: Sequence[Generation] | Sessions = (
            Sessions(sessions, self.vocabulary, size)
            if sessions
            else [materialise(request, answer, self.vocabulary, size) for request, answer in listed]
        )
        return replay(self._settled(scheduler), clients, self._clock())

    def _settled(self, scheduler: SchedulerPlan) -> Engine:
        """An engine to be timed: it captures no more graphs, which would pause it."""
        engine = self.planned_engine(scheduler)
        engine.executor.freeze_graphs()
        return engine

    def describe(self) -> dict[str, Any]:
        """The device, the dtype and the versions of the packages."""
        return {"device": device_name(self.device), "dtype": self.dtype, "versions": versions()}
