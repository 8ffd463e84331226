"""The machine's pace while an engine runs: the same small pieces of work are timed again and again, and the run's clock
stands still meanwhile.

A shared machine drifts by tens of per cent within seconds. Whatever is timed on it says as much of the machine as of
the engine, unless something that never changes is timed beside it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from latency_models.yardsticks import Reading, nearest
from live.models.decoder import Decoder
from live.models.linear import linear
from live.models.weights import DenseFFN

SIZES = (1, 8, 64)
"""Rows of the yardsticks. Products of one row, of several and of many are computed in different ways, and wait for
different parts of a machine."""


class Yardstick:
    """The products of one layer with so many rows: a few milliseconds of what steps are made of.

    All of them, since they do not slow down alike: of eight rows on one machine the wide product that begins an FFN
    varied twice as much as the narrow one that ends it. The first layer's are timed, which a step has long put out of
    the cache; one of the last layer's goes before and is not, since code and processor are cold for whatever differs
    from what ran before.

    Args:
        decoder: its layers' dense matrices are taken, in a mixture of experts those of attention.
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
        """Seconds that they take now."""
        work = [(self._ones(rows, columns), matrix) for matrix, columns in self._timed]
        warming, columns = self._warming
        with torch.inference_mode():
            linear(self._ones(rows, columns), warming)
            begin = time.perf_counter()
            for x, matrix in work:
                linear(x, matrix)
            return time.perf_counter() - begin


class PacedClock:
    """Seconds since it was made, less those that went to reading the pace.

    Args:
        yardstick: what is timed, told its rows; None: nothing, and the clock is any other.
        share: of the time of steps of each size, that goes to it at most. sizes: the rows that it can have.

    Attributes:
        readings: in order, their times by this clock.
    """

    def __init__(
        self, yardstick: Callable[[int], float] | None = None, share: float = 0.0, sizes: Sequence[int] = SIZES
    ) -> None:
        self.readings: list[Reading] = []
        self._yardstick, self._share = yardstick, share
        self._owed = dict.fromkeys(sizes, 0.0)  # seconds of each size's readings that its share is yet to make up for
        self._start = self._seen = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start

    def rest(self, rows: int) -> None:
        """Read the pace if it is time to: at first by every size, then by the one that is nearest to `rows`.

        To be called when a step of so many rows has just ended. After a wait the processor is cold, and the yardstick a
        tenth slower, which says nothing of the steps; so it is where products of another kind have run for a while.
        Nor is a wait made up for: there is at most one reading a step. Each size has a time of its own, so that large
        steps, which are few and whose readings are long, do not keep small ones from being followed.
        """
        stopped = time.perf_counter()
        if self._yardstick is None:
            return
        size = nearest(rows, self._owed)
        self._owed[size] -= self._share * (stopped - self._seen)
        self._seen = stopped
        for each in [size] if self.readings else self._owed:
            if self._owed[each] <= 0:
                begin = time.perf_counter()
                self.readings.append(Reading(stopped - self._start, each, self._yardstick(each)))
                self._owed[each] = time.perf_counter() - begin
        self._start += time.perf_counter() - stopped
