"""A bundle measured by direct execution, with its slots kept full (the closed loop of AFD 5.1).

The metrics are those of the twin (`twin/afd/measure.py`), by the same functions: throughput of eq. 21, TPOT of eq. 22
and idle shares of eq. 23. In two respects a real bundle does more than a simulated one. Its attention instances
compute prompts, in chunks beside the decodes, where the twin's requests come with their KV cache. And all of a worker's
Python counts as its work.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import SamplingParams
from live.clock import ClockName
from live.engine import Progress
from live.generation import Generation, make_generation
from live.memory import freeze_loaded_objects
from live.models.decoder import Decoder
from live.topologies.bundle.coordinator import Coordinator
from live.topologies.bundle.layout import COORDINATOR, BundleLayout
from live.topologies.bundle.local_bundle import LocalBundle
from live.topologies.direct_time import DirectTime, RoleTime, Transfers
from reports import metrics
from schedulers.bundle_slots import Refill, refill_fcfs

Integers = NDArray[np.int64]

WARM_UP_TOKENS = 8
"""Output tokens of each request before the measurement, one for each slot."""


@dataclass(frozen=True, slots=True)
class BundleMeasurement:
    """The metrics of one run. Times in seconds, throughput in tokens per second and instance.

    Attributes:
        clock: that all times are of.
        throughput: eq. 21. throughput_generated: with the tokens of requests in flight. tpot: eq. 22. tpot_gaps: per
            gap between tokens; None if no request has two tokens.
        idle_attention, idle_ffn: eq. 23, over each instance's own time.
        total_time: until the last of the completions. steps: of all microbatches.
        attention_to_ffn, ffn_to_attention: messages between them.
    """

    clock: ClockName
    throughput: float
    throughput_generated: float
    tpot: float
    tpot_gaps: float | None
    idle_attention: float
    idle_ffn: float
    total_time: float
    requests: int
    steps: int
    attention_to_ffn: Transfers
    ffn_to_attention: Transfers


class _Watch:
    """Notes steps and completions from `begin` on, and stops the bundle at the wanted number of these."""

    def __init__(self, completions: int, time: DirectTime) -> None:
        self.completions, self._time = completions, time
        self.finished: list[Generation] = []
        self.steps: list[tuple[float, int]] = []  # end, tokens
        self.roles: dict[int, RoleTime] = {}  # when the last of the completions has finished
        self.transfers: dict[tuple[int, int], Transfers] = {}
        self._coordinator: Coordinator | None = None

    def begin(self, coordinator: Coordinator) -> None:
        """Begin at time 0."""
        self._time.restart()
        self._coordinator = coordinator

    def note(self, progress: Progress) -> None:
        """A step of a microbatch has ended."""
        if self._coordinator is None:
            return
        self.steps.append((self._time.now(COORDINATOR), len(progress.advanced)))
        self.finished += progress.finished
        if len(self.finished) >= self.completions:
            self.roles, self.transfers = deepcopy(self._time.roles), deepcopy(self._time.transfers)
            self._coordinator.stop()
            self._coordinator = None


def measure_bundle(
    layout: BundleLayout,
    decoder: Decoder,
    prefill: Integers,
    decode: Integers,
    completions: int,
    *,
    time: DirectTime | None = None,
    refill: Refill = refill_fcfs,
) -> BundleMeasurement:
    """Run requests of these lengths, all there from the start, until `completions` have finished.

    With at least as many further requests as the bundle has slots, these stay full to the end. Prompts are random
    tokens. Torch must compute on one thread.

    Args:
        decoder: a whole model; all workers share its weights. time: the clocks, with the link.

    Raises:
        ValueError: a request that is too long for the bundle, or more completions than requests.
    """
    if not 0 < completions <= len(decode):
        raise ValueError(f"expected at most the {len(decode)} requests as completions, found {completions}")
    time = time or DirectTime()
    watch = _Watch(completions, time)
    bundle = LocalBundle(layout, decoder, refill=refill, timekeeper=time, packed=True, on_progress=watch.note)
    warm_up, generations = closed_loop(layout, decoder.config.shape.vocabulary, prefill, decode)
    for generation in warm_up:
        bundle.submit(generation)
    bundle.run()
    freeze_loaded_objects()
    watch.begin(bundle.coordinator)
    for generation in generations:
        bundle.submit(generation)
    bundle.run()
    return _summary(layout, watch)


def closed_loop(
    layout: BundleLayout, vocabulary: int, prefill: Integers, decode: Integers
) -> tuple[list[Generation], list[Generation]]:
    """Requests that warm the bundle up, one for each slot, and those to measure. Their tokens are random."""
    slots = layout.attention_instances * layout.microbatches * layout.batch_size
    lengths = [*zip(prefill.tolist(), decode.tolist(), strict=True), *[(1, WARM_UP_TOKENS)] * slots]
    rng, greedy = np.random.default_rng(0), SamplingParams(temperature=0.0)
    generations = [
        make_generation(i, rng.integers(vocabulary, size=prompt), tokens, sampling_params=greedy)
        for i, (prompt, tokens) in enumerate(lengths)
    ]
    return generations[len(decode) :], generations[: len(decode)]


def _summary(layout: BundleLayout, watch: _Watch) -> BundleMeasurement:
    ended = watch.finished[: watch.completions]
    tokens = np.array([len(each.output) for each in ended], dtype=np.int64)
    first = np.array([each.first_token for each in ended])
    finish = np.array([each.last_token for each in ended])
    instances = layout.attention_instances + layout.ffn_instances
    stable = metrics.stable_throughput(tokens, finish)
    generated = sum(count for end, count in watch.steps if end <= stable.time)
    return BundleMeasurement(
        clock=DirectTime.name,
        throughput=stable.per_instance(instances),
        throughput_generated=generated / stable.time / instances,
        tpot=metrics.tpot_paper(first, finish, tokens),
        tpot_gaps=metrics.tpot(first, finish, tokens),
        idle_attention=_idle(watch.roles, layout.attention_ranks),
        idle_ffn=_idle(watch.roles, layout.ffn_ranks),
        total_time=float(finish[-1]),
        requests=len(ended),
        steps=len(watch.steps),
        attention_to_ffn=_between(watch.transfers, layout.attention_ranks, layout.ffn_ranks),
        ffn_to_attention=_between(watch.transfers, layout.ffn_ranks, layout.attention_ranks),
    )


def _idle(roles: dict[int, RoleTime], ranks: range) -> float:
    """Idle share of some instances, each over its own time so far."""
    return metrics.idle_ratio(sum(roles[rank].busy for rank in ranks), 1, sum(roles[rank].now for rank in ranks))


def _between(transfers: dict[tuple[int, int], Transfers], sources: range, destinations: range) -> Transfers:
    """The messages from some roles to others."""
    found = [transfers[pair] for pair in transfers if pair[0] in sources and pair[1] in destinations]
    return Transfers(
        sum(each.messages for each in found), sum(each.size for each in found), sum(each.seconds for each in found)
    )
