"""A bundle measured by direct execution, with its slots kept full (the closed loop of AFD 5.1).

The metrics are those of the twin (`twin/afd/point.py`), by the same functions: throughput of eq. 21, TPOT of eq. 22
and idle shares of eq. 23. All of a worker's Python counts as its work.

The attention instances compute prompts, in chunks beside the decodes. With `prefilled` they do not: requests come with
their first token and the KV cache of their prompts, as in the paper and in the twin. The caches are then filled with
random numbers beforehand, and nothing is written to them when a request enters, so the tokens have no meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from latency_models.stages import MessageLink
from live.device import no_garbage_collection
from live.engine import Progress
from live.generation import GREEDY, Generation, make_generation
from live.loaded_model import LoadedModel, LoadedSource
from live.models.decoder import Decoder
from live.topologies.bundle.coordinator import COORDINATOR, BundleLayout
from live.topologies.bundle.workers import AttentionWorker
from live.topologies.direct_time import DirectTime, RoleTime
from live.topologies.local import LocalTopology
from live.topologies.processes import BundleDeployment
from live.validation.backend import model_source
from reports.metrics import BundleTimes, Transfers
from scenarios.validation import BundleValidationScenario
from schedulers.engine_config import EngineConfig

Integers = NDArray[np.int64]

WARM_UP_TOKENS = 8
"""Output tokens of each request before the measurement, one for each slot."""


class BundleRun(NamedTuple):
    """One run: times of requests, steps and roles, and by rank the stretches of work (`DirectTime.work`)."""

    times: BundleTimes
    work: Mapping[int, Sequence[float]]


class MeasuredBundle:
    """A bundle and requests of given lengths, all there from the start; it runs until `completions` have finished.

    With at least as many further requests as the bundle has slots, these stay full to the end. Prompts are random
    tokens. Torch must compute on one thread. Call `begin`, `run_some` until it returns True, and `result`.

    All workers share the decoder's weights. `time`: the clocks, with the link. `prefilled`: requests come with the KV
    cache of their prompts; otherwise the bundle computes it. Raises ValueError for more completions than requests.
    """

    def __init__(
        self,
        layout: BundleLayout,
        decoder: Decoder,
        prefill: Integers,
        decode: Integers,
        completions: int,
        *,
        time: DirectTime | None = None,
        refill: str = "fcfs",
        prefilled: bool = False,
    ) -> None:
        if not 0 < completions <= len(decode):
            raise ValueError(f"expected at most the {len(decode)} requests as completions, found {completions}")
        self._layout = layout
        self._prefilled = prefilled
        self._completions = completions
        self._time = time or DirectTime()
        self._end: DirectTime | None = None  # a copy of all times, when the last of the completions has finished
        self._finished: list[Generation] = []
        self._steps: list[tuple[float, int]] = []  # end, tokens
        self._measuring = False
        deployment = BundleDeployment(LoadedSource.of(decoder), layout, refill)
        self._bundle = LocalTopology(deployment, on_progress=self._note, timekeeper=self._time, packed=True)
        vocabulary = decoder.config.shape.vocabulary
        warm_up, self._generations = closed_loop(layout, vocabulary, prefill, decode, prefilled=prefilled)
        for generation in self._generations:
            self._bundle.front.check(generation)
        for generation in warm_up:
            self._bundle.submit(generation)
        self._bundle.run()
        if prefilled:
            _fill_caches(self._bundle.workers[: layout.attention_instances])

    def begin(self) -> None:
        """Submit the requests, at time 0."""
        self._time.restart()
        self._measuring = True
        for generation in self._generations:
            self._bundle.submit(generation)
        self._bundle.network.wake(COORDINATOR)

    def run_some(self, turns: int) -> bool:
        """Resume roles this many times; returns whether the run is over."""
        return self._bundle.network.run_some(turns)

    def stop(self) -> None:
        """End the run before its completions."""
        self._end_measurement()
        self._bundle.run()

    def result(self) -> BundleRun:
        """The finished run, in which at least one request has finished."""
        layout, end, finished = self._layout, self._end, self._finished[: self._completions]
        assert end is not None, "the run is over"
        step_ends, step_tokens = zip(*self._steps, strict=True)
        times = BundleTimes(
            ids=np.array([generation.request.id for generation in finished], dtype=np.int64),
            tokens=np.array([len(generation.output) - self._prefilled for generation in finished], dtype=np.int64),
            first_token=np.array([generation.first_token for generation in finished]),
            finish=np.array([generation.last_token for generation in finished]),
            step_ends=np.array(step_ends),
            step_tokens=np.array(step_tokens, dtype=np.int64),
            attention=_busy_and_elapsed(end.roles, layout.attention_ranks),
            ffn=_busy_and_elapsed(end.roles, layout.ffn_ranks),
            attention_to_ffn=_between(end.transfers, layout.attention_ranks, layout.ffn_ranks),
            ffn_to_attention=_between(end.transfers, layout.ffn_ranks, layout.attention_ranks),
        )
        return BundleRun(times, end.work)

    def _note(self, progress: Progress) -> None:
        if not self._measuring:
            return
        advanced = progress.advanced
        self._steps.append((advanced[0].last_token if advanced else self._time.now(COORDINATOR), len(advanced)))
        self._finished += progress.finished
        if len(self._finished) >= self._completions:
            self._end_measurement()

    def _end_measurement(self) -> None:
        """Keep the roles' times, and stop the bundle; again it changes nothing."""
        if self._measuring:
            self._end = self._time.snapshot()
            self._measuring = False
            self._bundle.front.stop()


TURNS = 64
"""Resumptions of roles after which the next of several bundles goes on."""


def run_in_turns(bundles: Sequence[MeasuredBundle]) -> list[BundleRun]:
    """Run bundles until one is over, some milliseconds each in turn, so that all meet the same machine speed."""
    first, *competitors = bundles
    with no_garbage_collection():
        for bundle in bundles:
            bundle.begin()
        while not first.run_some(TURNS):
            competitors = [bundle for bundle in competitors if not bundle.run_some(TURNS)]
    for bundle in competitors:
        bundle.stop()
    return [bundle.result() for bundle in bundles]


def _fill_caches(attention: Sequence[AttentionWorker]) -> None:
    generator = torch.Generator().manual_seed(0)
    for worker in attention:
        for engine in worker.engines:
            for cache in (engine.executor.cache.keys, engine.executor.cache.values):
                cache.normal_(generator=generator)


def closed_loop(
    layout: BundleLayout, vocabulary: int, prefill: Integers, decode: Integers, *, prefilled: bool = False
) -> tuple[list[Generation], list[Generation]]:
    """Random requests to fill every slot once, and those to measure. `prefilled`: the former have their first token."""
    slots = layout.attention_instances * layout.microbatches * layout.batch_size
    lengths = [*zip(prefill.tolist(), decode.tolist(), strict=True), *[(1, WARM_UP_TOKENS)] * slots]
    rng = np.random.default_rng(0)
    block_size = layout.engine.prefix_id_tokens
    generations = [
        make_generation(
            i, rng.integers(vocabulary, size=prompt), tokens + prefilled, sampling_params=GREEDY, block_size=block_size
        )
        for i, (prompt, tokens) in enumerate(lengths)
    ]
    if prefilled:
        for generation in generations:
            generation.output.append(int(rng.integers(vocabulary)))
    return generations[len(decode) :], generations[: len(decode)]


def _busy_and_elapsed(roles: Mapping[int, RoleTime], ranks: range) -> NDArray[np.float64]:
    """Busy and elapsed seconds of some instances, shape (instances, 2)."""
    return np.array([(roles[rank].busy, roles[rank].now) for rank in ranks])


def _between(transfers: Mapping[tuple[int, int], Transfers], sources: range, destinations: range) -> Transfers:
    total = Transfers()
    for pair, counts in transfers.items():
        if pair[0] in sources and pair[1] in destinations:
            total.messages += counts.messages
            total.size += counts.size
            total.seconds += counts.seconds
    return total


class LiveBundle(LoadedModel):
    """Bundles of the model of a scenario, loaded once, on the CPU."""

    def __init__(self, scenario: BundleValidationScenario, base: Path) -> None:
        super().__init__(model_source(scenario.model, base, scenario.seed))
        self._system = scenario.system
        self._link: MessageLink = self._system.link.build()
        shape = self.decoder.config.shape
        self.layers = shape.layers
        self.row_bytes = shape.hidden * self.decoder.weights.norm.dtype.itemsize
        """Bytes of one request's row, on its way to the FFN and back."""

    def run_in_turns(self, instances: int, loads: Sequence[tuple[Integers, Integers, int]]) -> list[BundleRun]:
        """Run bundles with `instances` attention instances each in turns of milliseconds, until the first is over."""
        return run_in_turns([self._bundle(instances, *load) for load in loads])

    def _bundle(self, instances: int, prefill: Integers, decode: Integers, completions: int) -> MeasuredBundle:
        system = self._system
        blocks = system.batch_size * (int((prefill + decode).max()) // system.block_size + 2)
        config = EngineConfig(
            num_gpu_blocks=blocks, block_size=system.block_size, prefix_id_tokens=system.block_size,
            max_num_seqs=system.batch_size, max_num_batched_tokens=system.batch_size,
        )  # fmt: skip
        return MeasuredBundle(
            BundleLayout(instances, 1, system.microbatches, config), self.decoder, prefill, decode, completions,
            time=DirectTime(self._link), refill=system.refill, prefilled=True,
        )  # fmt: skip
