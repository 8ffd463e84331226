"""Prefill and decode engines of one or several models on this machine, run by direct execution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from latency_models.stages import MessageLink
from live.engine import Progress
from live.generation import Generation
from live.loaded_model import LoadedModel
from live.memory import no_garbage_collection
from live.models.decoder import Decoder
from live.topologies.pools.deployment import LocalPools
from live.topologies.pools.layout import FRONT, kv_bytes, pools_layout
from live.validation.backend import IN_TURNS_SEED, Requests, WithoutDrafts, generations_of, model_source
from live.validation.pools_profiling import TURNS, PoolsProfile
from live.validation.profiling import ProfilingLimits, ProfilingResult
from live.validation.replay import request_columns
from live.validation.role_steps import RecordedTime, Span, role_steps, watch_steps
from scenarios.engine import SchedulerPlan
from scenarios.validation import ProfilingSpec, ValidationScenario, engine_pools
from schedulers.engine_config import EngineConfig
from schedulers.step_policies import ChunkPolicy
from workloads.errors import BadInput

Floats = npt.NDArray[np.float64]


class ReplayedPools:
    """A replayed workload, in seconds of each role's own clock: `spans` as in `live.validation.role_steps`."""

    speculation: ClassVar[None] = None
    scaling: ClassVar[None] = None

    def __init__(self, generations: Sequence[Generation]) -> None:
        self.spans: list[Span] = []
        self.profiled: ProfilingResult | None = None
        self._generations = generations
        self._times: dict[int, list[float]] = {generation.request.id: [] for generation in generations}

    def note(self, progress: Progress) -> None:
        """Note the tokens of a step."""
        for generation in progress.advanced:
            self._times[generation.request.id].append(generation.last_token)

    @property
    def token_times(self) -> list[list[float]]:
        """The times of each request's output tokens, at the front."""
        return [self._times[generation.request.id] for generation in self._generations]

    def columns(self) -> dict[str, Floats]:
        """One entry a request: arrival, noticed (by the front), first_token, last_token, output_tokens."""
        return request_columns(self._generations, [generation.submitted for generation in self._generations])


class PoolsBackend(WithoutDrafts, LoadedModel):
    """The pools of a scenario, on the CPU; `BadInput` as of `LoadedModel`, or for a link of other bytes a token."""

    def __init__(self, scenario: ValidationScenario, base: Path) -> None:
        spec, link = scenario.model, scenario.system.kv_link
        assert link is not None
        super().__init__(model_source(spec, base, scenario.seed))
        if link.bytes_per_token != (expected := kv_bytes(self.decoder.config, spec.dtype)):
            raise BadInput(
                f"expected {expected}, the bytes of the model's KV cache of a token",
                field="system.link.bytes_per_token",
                value=link.bytes_per_token,
            )
        serving, pools = engine_pools(scenario.serving_without_times(), {}, base / "scenario")
        self._layout, _ = pools_layout(serving, pools)
        self._link = MessageLink(link.latency, link.bandwidth)
        self._decoder_of = self._load_modules(scenario, base)
        self._spec = scenario.profiling
        self._profile_in_turns: PoolsProfile | None = None

    @property
    def models(self) -> list[str]:
        """Names of the models that requests may be for."""
        return list(self._layout.prefill)

    def _load_modules(self, scenario: ValidationScenario, base: Path) -> Callable[[str | None], Decoder]:
        """The decoder of each module, with random weights of its own."""
        spec = scenario.model
        names = sorted({place.module for place in self._layout.engines if place.module is not None})
        if names and spec.weights != "random":
            raise BadInput("expected random with several models", field="model.weights", value=spec.weights)
        decoders: dict[str | None, Decoder] = {None: self.decoder}
        for seed, name in enumerate(names, start=scenario.seed + 1):
            decoders[name] = replace(model_source(spec, base, seed), rounding=None).load()
        return decoders.__getitem__

    def profile(self, scheduler: SchedulerPlan, spec: ProfilingSpec, seed: int) -> ProfilingResult:
        """Time steps of random requests in this topology (`live.validation.pools_profiling`)."""
        return self._new_profile(scheduler.config, spec, seed).run(spec.rounds)

    def _new_profile(self, config: EngineConfig, spec: ProfilingSpec, seed: int) -> PoolsProfile:
        limits = ProfilingLimits(
            spec.max_prompt_tokens, spec.max_output_tokens, config.max_num_seqs, spec.rounds, spec.max_steps
        )
        decode_ranks, time = sorted(set(chain(*self._layout.decode.values()))), RecordedTime(self._link)
        return PoolsProfile(self._pools, time, self.models, decode_ranks, limits, self.vocabulary, seed)

    def _pools(
        self,
        time: RecordedTime,
        on_progress: Callable[[Progress], None],
        chunks: Callable[[], ChunkPolicy | None] = lambda: None,
    ) -> LocalPools:
        return LocalPools(
            self._layout, self._decoder_of, timekeeper=time, packed=True, on_progress=on_progress, chunks=chunks
        )

    def replay(self, scheduler: SchedulerPlan, requests: Requests) -> ReplayedPools:
        """Send each request to the front at its arrival time; a profile in turns goes on where it paused before."""
        unsorted = generations_of(requests, self.vocabulary, scheduler.config.prefix_id_tokens)
        generations = sorted(unsorted, key=lambda generation: generation.request.arrival)
        if self._spec.in_turns and self._profile_in_turns is None:
            self._profile_in_turns = self._new_profile(scheduler.config, self._spec, IN_TURNS_SEED)
        profile = self._profile_in_turns
        replayed, time = ReplayedPools(generations), RecordedTime(self._link)
        pools = self._pools(time, replayed.note, scheduler.chunk_policy)
        time.restart()
        steps = {rank: watch_steps(worker.engine) for rank, worker in enumerate(pools.workers, start=1)}
        for generation in generations:
            pools.frontend.check(generation)
            pools.network.at(FRONT, generation.request.arrival, partial(pools.submit, generation))
        with no_garbage_collection():
            while not pools.network.run_some(TURNS):
                if profile is not None:
                    profile.go_on()
        if profile is not None:
            replayed.profiled = profile.take()
        for rank, timed in steps.items():
            replayed.spans += role_steps(time, rank, timed).spans
        return replayed
