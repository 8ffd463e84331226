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
    """A product of so many rows with a matrix of the model: a millisecond of what its steps are made of.

    The matrix is one that each layer has. The last layer's goes first and is not timed, since code and processor are
    cold for whatever differs from what ran before; the first layer's is, which a step has long put out of the cache.

    Args:
        decoder: its dense layers' last matrix is taken, or in a mixture of experts that of attention.
    """

    def __init__(self, decoder: Decoder) -> None:
        first, last = decoder.weights.layers[0], decoder.weights.layers[-1]
        shape = decoder.config.shape
        if isinstance(first.ffn, DenseFFN) and isinstance(last.ffn, DenseFFN):
            self._timed, self._warming, columns = first.ffn.down, last.ffn.down, shape.intermediate
        else:
            self._timed, self._warming, columns = first.o, last.o, shape.heads * shape.head_dim
        norm = decoder.weights.norm
        self._rows = functools.cache(lambda rows: torch.ones(rows, columns, dtype=norm.dtype, device=norm.device))

    def __call__(self, rows: int) -> float:
        """Seconds that it takes now."""
        x = self._rows(rows)
        with torch.inference_mode():
            linear(x, self._warming)
            begin = time.perf_counter()
            linear(x, self._timed)
            return time.perf_counter() - begin


class PacedClock:
    """Seconds since it was made, less those that went to reading the pace.

    Args:
        yardstick: what is timed, told its rows; None: nothing, and the clock is any other.
        share: of all time, that goes to it. sizes: the rows that it can have.

    Attributes:
        readings: in order, their times by this clock.
    """

    def __init__(
        self, yardstick: Callable[[int], float] | None = None, share: float = 0.0, sizes: Sequence[int] = SIZES
    ) -> None:
        self.readings: list[Reading] = []
        self._yardstick, self._share = yardstick, share
        self._sizes = sizes
        self._credit = self._most = 0.0  # seconds that may go to readings now, and at any time
        self._start = self._seen = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start

    def rest(self, rows: int) -> None:
        """Read the pace if it is time to: at first by every size, then by the one that is nearest to `rows`.

        To be called when a step of so many rows has just ended. After a wait the processor is cold, and the yardstick a
        tenth slower, which says nothing of the steps; so it is where products of another kind have run for a while.
        Nor is a wait made up for by more than the time of a reading of each size.
        """
        stopped = time.perf_counter()
        if self._yardstick is None:
            return
        self._credit = min(self._credit + self._share * (stopped - self._seen), self._most)
        self._seen = stopped
        if not self.readings:
            self._most = sum(self._read(self._yardstick, size, stopped) for size in self._sizes)
        size = nearest(rows, self._sizes)
        while self._credit >= 0:
            self._read(self._yardstick, size, stopped)
        self._start += time.perf_counter() - stopped

    def _read(self, yardstick: Callable[[int], float], rows: int, stopped: float) -> float:
        """One reading, at the time at which the clock was stopped; what it cost, seconds."""
        begin = time.perf_counter()
        self.readings.append(Reading(stopped - self._start, rows, yardstick(rows)))
        cost = time.perf_counter() - begin
        self._credit -= cost
        return cost
