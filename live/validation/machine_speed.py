"""Reads the machine's speed while an engine runs: small fixed pieces of work are timed between steps, off the clock.

A shared machine's speed drifts by tens of per cent within seconds, so a step's duration depends on the machine as much
as on the engine. Nothing else depends on this module: a validation runs without it where `machine_speed` is off.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from latency_models.speed_probes import Reading, nearest
from live.clock import Clock
from live.models.decoder import Decoder
from live.models.linear import linear
from live.models.weights import DenseFFN

PROBE_ROWS = (1, 8, 64)
"""Rows of the speed probes. Matrix products with one row, a few and many rows use different algorithms, and are limited
by different parts of a machine."""

WARM_UP = 5
"""Untimed runs of each probe: the first ones allocate memory and load code."""


class SpeedProbe:
    """The matrix products of one layer: a few milliseconds of the work that steps consist of.

    All products of the layer are timed, because they do not slow down alike: on one machine the wide product that
    begins an FFN varied twice as much as the narrow one that ends it. The first layer is timed, whose weights a step
    has evicted from the cache. One product of the last layer runs before it, untimed, because the processor is slow
    right after other work.

    Args:
        decoder: its dense weights are used; in a mixture of experts those of attention.
    """

    def __init__(self, decoder: Decoder) -> None:
        shape, weights = decoder.config.shape, decoder.weights
        first, last = weights.layers[0], weights.layers[-1]
        wide = shape.heads * shape.head_dim
        self._warming = last.o, wide
        self._timed = [(first.qkv, shape.hidden), (first.o, wide)]
        if isinstance(first.ffn, DenseFFN):
            self._timed += [(first.ffn.gate_up, shape.hidden), (first.ffn.down, shape.intermediate)]
        dtype, device = weights.norm.dtype, weights.norm.device
        self._ones = functools.cache(lambda rows, columns: torch.ones(rows, columns, dtype=dtype, device=device))

    def __call__(self, rows: int) -> float:
        """Run the products with `rows` rows, and return their duration in seconds."""
        work = [(self._ones(rows, columns), matrix) for matrix, columns in self._timed]
        warming, columns = self._warming
        with torch.inference_mode():
            linear(self._ones(rows, columns), warming)
            begin = time.perf_counter()
            for x, matrix in work:
                linear(x, matrix)
            return time.perf_counter() - begin


class SpeedReadings:
    """Readings of a machine's speed during one run, whose clock is paused meanwhile.

    Args:
        clock: of the run.
        probe: runs a probe with the given rows, and returns its seconds.
        share: largest share of the time of steps that their probe may take.
        sizes: rows of the probes.

    Attributes:
        readings: in order.
    """

    def __init__(
        self, clock: Clock, probe: Callable[[int], float], share: float, sizes: Sequence[int] = PROBE_ROWS
    ) -> None:
        self.readings: list[Reading] = []
        self._clock, self._probe, self._share = clock, probe, share
        self._debt = dict.fromkeys(sizes, 0.0)  # seconds of each probe's readings that its share has not yet covered
        self._last = time.perf_counter()

    def after_step(self, rows: int) -> None:
        """Take a reading if the share allows it: first of every probe, later of the one nearest to `rows`.

        Readings are taken right after a step: after a wait the processor is cold, and a probe is a tenth slower, which
        says nothing about steps. A wait earns no further readings: there is at most one a step. Each probe has a share
        of its own, so that the long readings of large steps do not delay those of small steps.
        """
        now = self._clock()
        with self._clock.paused():
            begin = time.perf_counter()
            size = nearest(rows, self._debt)
            self._debt[size] -= self._share * (begin - self._last)
            self._last = begin
            for each in [size] if self.readings else self._debt:
                if self._debt[each] <= 0:
                    begin = time.perf_counter()
                    self.readings.append(Reading(now, each, self._probe(each)))
                    self._debt[each] = time.perf_counter() - begin


class MachineSpeedReader:
    """Reads the machine's speed during runs, with one model's speed probes.

    Args:
        share: as in `SpeedReadings`.
    """

    rows: Sequence[int] = PROBE_ROWS

    def __init__(self, decoder: Decoder, share: float) -> None:
        self._decoder, self._share = decoder, share

    @functools.cached_property
    def probe(self) -> SpeedProbe:
        """The probe, warmed up."""
        probe = SpeedProbe(self._decoder)
        for rows in [*self.rows] * WARM_UP:
            probe(rows)
        return probe

    def during(self, clock: Clock) -> SpeedReadings:
        """Readings of a new run with this clock."""
        return SpeedReadings(clock, self.probe, self._share, self.rows)
