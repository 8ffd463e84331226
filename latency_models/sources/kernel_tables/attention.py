"""Attention of one step, from a four-axis table: decodes alone, prompts alone, and both in one kernel.

**Axes.** `kv_prefill` counts the cached tokens before a chunk, `kv_decode` those before a decode's own token. So a
decode that attends to k tokens is found at k - 1.

**Regimes.** Kernels change with the batch. Decodes alone use a kernel that splits long contexts over the device and
serves all heads of a group at once. With one longer query in the batch, decodes run as queries of one row among tiles
of 64 or 128. Each regime is therefore interpolated within itself. A chunk of one token counts as a decode.

**Several chunks.** The table has steps with one chunk. The work of a kernel is W = Σ c·(k + c/2), tokens times the
context that each sees. Several chunks cost what one chunk of C = Σ c tokens costs at the context K with the same work,
C·(K + C/2) = W, and at least as much as the most expensive of them alone, since they run side by side. Several fresh
prompts have less work than one prompt of their total length, so K < 0; the table is continued by point reflection at
K = 0. The largest chunk is looked up together with the decodes, because the longest query decides how many tiles the
kernel lays out for every sequence. The other chunks add what they add to a step of prompts alone.

**Uneven decodes** cost t(mean) + α · (t(longest) - t(mean)), see `skew.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from math import inf

from latency_models.interpolation import Flag, Grid, Point, bracket, make_grid
from latency_models.sources.kernel_tables.skew import KNOTS, SkewFit
from latency_models.sources.kernel_tables.tables import AttentionTable
from schedulers.batches import Batch


class Segments:
    """A piecewise line as lists: segment i begins at (starts[i], values[i]) and rises by slopes[i], the last without
    end.

    Lookups are written out where they are used, since they run for every simulated step: `i = bisect_right(starts, x) -
    1`, then `values[i] + slopes[i] * (x - starts[i])`.
    """

    __slots__ = ("slopes", "starts", "values")

    def __init__(self, xs: list[float], ys: list[float]) -> None:
        places = range(len(xs) - 1)
        self.starts = xs[:-1]
        self.values = ys[:-1]
        self.slopes = [(ys[i + 1] - ys[i]) / (xs[i + 1] - xs[i]) for i in places]


class DecodeCurve:
    """Attention for one number of decodes: seconds by history, its longest measured value, and α by skewness."""

    __slots__ = ("alphas", "line", "reach")

    def __init__(self, line: Segments, reach: float, alphas: Segments) -> None:
        self.line = line
        self.reach = reach
        self.alphas = alphas

    def __deepcopy__(self, memo: dict[int, object]) -> DecodeCurve:
        return self  # never changes


class PromptCells:
    """Prompts alone: seconds within each cell of the grid, as coefficients of its lower corner.

    `cells`: (size, context, seconds, rise by tokens, by context, and by tokens of that). `within`: the largest size and
    context that need no look at where measurements end.
    """

    __slots__ = ("cells", "contexts", "sizes", "within")

    def __init__(self, grid: Grid) -> None:
        sizes, contexts = grid.axes
        self.sizes = sizes[:-1]
        self.contexts = contexts[:-1]
        self.within = grid.limits if grid.reach is None else NOTHING
        self.cells: list[list[tuple[float, float, float, float, float, float]]] = []
        for i, (size, next_size) in enumerate(pairwise(sizes)):
            low, high, width = grid.times[i], grid.times[i + 1], next_size - size
            row = []
            for j, (context, next_context) in enumerate(pairwise(contexts)):
                by_context = (low[j + 1] - low[j]) / (next_context - context)
                beyond = (high[j + 1] - high[j]) / (next_context - context)
                by_tokens = (high[j] - low[j]) / width
                row.append((size, context, low[j], by_tokens, by_context, (beyond - by_context) / width))
            self.cells.append(row)

    def __deepcopy__(self, memo: dict[int, object]) -> PromptCells:
        return self  # never changes


class AttentionTimes:
    """Seconds of attention in all layers of one step; `flag` is called for values outside the table."""

    def __init__(self, table: AttentionTable, skew: SkewFit | None, scale: float, flag: Flag) -> None:
        regimes = table.regimes
        self._decode = make_grid(regimes.decode, scale)
        self._prefill = make_grid(regimes.prefill, scale)
        self._mixed = make_grid(regimes.mixed, scale)
        self._floor = min(regimes.prefill.values()) * scale
        self._prompts = PromptCells(self._prefill)
        self._starts = tuple(axis[:-1] for axis in self._mixed.axes)
        self._within = self._mixed.limits if self._mixed.reach is None else NOTHING
        self._skew = skew
        self._flag = flag
        self._curves: dict[int, DecodeCurve] = {}
        self._counts: dict[int, tuple[int, float, Segments]] = {}

    # -- decodes alone -----------------------------------------------------------------------------------------------

    def decode(self, decodes: int, kv: int, longest: int) -> float:
        """Seconds of decodes alone; `kv`: tokens that all attend to, `longest`: that the longest attends to."""
        curve = self._curves.get(decodes) or self._curve(decodes)
        line = curve.line
        starts = line.starts
        mean, top = kv / decodes - 1.0, longest - 1.0
        if top > curve.reach:
            self._flag("attention.kv_decode", top)
        i = bisect_right(starts, mean) - 1
        even = line.values[i] + line.slopes[i] * (mean - starts[i])
        if top <= mean:
            return even
        i = bisect_right(starts, top) - 1
        worst = line.values[i] + line.slopes[i] * (top - starts[i])
        alphas, uneven = curve.alphas, 1.0 - mean / top
        i = bisect_right(alphas.starts, uneven) - 1
        return even + (alphas.values[i] + alphas.slopes[i] * (uneven - alphas.starts[i])) * (worst - even)

    def decode_run(self, decodes: int, kv: int, longest: int, steps: int, fixed: float) -> list[float]:
        """The values of `fixed + decode(…)` for successive steps, bit for bit: segments are found by going on."""
        curve = self._curves.get(decodes) or self._curve(decodes)
        starts, values, slopes = curve.line.starts, curve.line.values, curve.line.slopes
        knots, levels, rises = curve.alphas.starts, curve.alphas.values, curve.alphas.slopes
        if longest + steps - 2.0 > curve.reach:
            self._flag("attention.kv_decode", longest + steps - 2.0)
        i = bisect_right(starts, kv / decodes - 1.0) - 1
        j = bisect_right(starts, longest - 1.0) - 1
        start, next_start = starts[i], starts[i + 1] if i + 1 < len(starts) else inf
        longest_start, longest_next = starts[j], starts[j + 1] if j + 1 < len(starts) else inf
        seconds: list[float] = []
        for _ in range(steps):
            mean, top = kv / decodes - 1.0, longest - 1.0
            while mean >= next_start:
                i += 1
                start, next_start = starts[i], starts[i + 1] if i + 1 < len(starts) else inf
            even = values[i] + slopes[i] * (mean - start)
            if top > mean:
                while top >= longest_next:
                    j += 1
                    longest_start, longest_next = starts[j], starts[j + 1] if j + 1 < len(starts) else inf
                worst = values[j] + slopes[j] * (top - longest_start)
                uneven = 1.0 - mean / top
                k = bisect_right(knots, uneven) - 1
                even = even + (levels[k] + rises[k] * (uneven - knots[k])) * (worst - even)
            seconds.append(fixed + even)
            kv += decodes
            longest += 1
        return seconds

    def _curve(self, decodes: int) -> DecodeCurve:
        """The table at one number of decodes, cached, since a run of steps uses the same one."""
        grid = self._decode
        counts, histories = grid.axes
        k, share = bracket(counts, decodes)
        times = [a + (b - a) * share for a, b in zip(grid.times[k], grid.times[k + 1], strict=True)]
        if decodes > grid.limits[0]:
            self._flag("attention.n_decode", decodes)
        reach = grid.limits[1] if grid.reach is None else min(grid.reach[k : k + 2] if share else grid.reach[k : k + 1])
        curve = DecodeCurve(Segments(histories, times), reach, self._alphas("pure", decodes))
        self._curves[decodes] = curve
        return curve

    # -- prompts, alone and beside decodes ---------------------------------------------------------------------------

    def mixed(self, batch: Batch) -> float:
        """Seconds of a batch with prompt chunks."""
        decodes, kv, longest = batch.n_decodes, batch.decode_kv, batch.longest_decode
        chunks: list[tuple[int, int]] = []
        for chunk in batch.chunks:
            if chunk.tokens > 1:
                chunks.append((chunk.tokens, chunk.context))
                continue
            decodes += 1
            kv += chunk.context + 1
            if chunk.context >= longest:
                longest = chunk.context + 1
        if not chunks:
            return self.decode(decodes, kv, longest)
        if len(chunks) == 1:
            tokens, context = chunks[0]
            if not decodes:
                return self._prompt(tokens, context)
            return self._beside(tokens, context, decodes, kv / decodes - 1.0, longest - 1.0)
        tokens, context = largest = max(chunks)
        separate = [self._prompt(*chunk) for chunk in chunks]
        together = self._together(chunks, max(separate))
        if not decodes:
            return together
        time = self._beside(tokens, context, decodes, kv / decodes - 1.0, longest - 1.0)
        return time + max(together - separate[chunks.index(largest)], 0.0)

    def _together(self, chunks: list[tuple[int, int]], slowest: float) -> float:
        work = 0.0
        tokens = 0
        for count, context in chunks:
            tokens += count
            work += count * (context + 0.5 * count)
        even = work / tokens - 0.5 * tokens
        if even >= 0:
            together = self._prompt(tokens, even)
        else:
            together = max(2.0 * self._prompt(tokens, 0) - self._prompt(tokens, -even), self._floor)
        return together if together > slowest else slowest

    def _prompt(self, tokens: int, context: float) -> float:
        prompts = self._prompts
        within = prompts.within
        if tokens > within[0] or context > within[1]:
            self._report(self._prefill, (tokens, context), ("prefill_chunk", "kv_prefill"))
        row = prompts.cells[bisect_right(prompts.sizes, tokens) - 1]
        size, start, seconds, by_tokens, by_context, by_both = row[bisect_right(prompts.contexts, context) - 1]
        further = tokens - size
        return seconds + by_tokens * further + (by_context + by_both * further) * (context - start)

    def _beside(self, tokens: int, context: int, decodes: int, mean: float, top: float) -> float:
        """Seconds of one chunk and of decodes with this mean and longest history."""
        within = self._within
        if tokens > within[0] or context > within[1] or decodes > within[2] or top > within[3]:
            self._report(self._mixed, (tokens, context, decodes, top), _MIXED)
        sizes, contexts, _, histories = self._mixed.axes
        starts = self._starts
        k, w, alphas = self._counts.get(decodes) or self._count(decodes)
        i = bisect_right(starts[0], tokens) - 1
        a = bisect_right(starts[3], mean) - 1
        b = bisect_right(starts[3], top) - 1
        u = (tokens - sizes[i]) / (sizes[i + 1] - sizes[i])
        f = (mean - histories[a]) / (histories[a + 1] - histories[a])
        g = (top - histories[b]) / (histories[b + 1] - histories[b])
        low, high = self._mixed.times[i : i + 2]
        if context:
            j, v = bracket(contexts, context)
            planes = (((1.0 - v) * (1.0 - u), low[j]), (v * (1.0 - u), low[j + 1]),
                      ((1.0 - v) * u, high[j]), (v * u, high[j + 1]))  # fmt: skip
            even, worst = _over_planes(planes, k, w, a, f, b, g)
        else:
            even, worst = _over_fresh_prompts(u, low[0], high[0], k, w, a, f, b, g)
        if top <= mean:
            return even
        uneven = 1.0 - mean / top
        i = bisect_right(alphas.starts, uneven) - 1
        return even + (alphas.values[i] + alphas.slopes[i] * (uneven - alphas.starts[i])) * (worst - even)

    # -- both --------------------------------------------------------------------------------------------------------

    def _count(self, decodes: int) -> tuple[int, float, Segments]:
        """The interval of a number of decodes beside a prompt, the share of the way through it, and α; cached."""
        count = self._counts[decodes] = (*bracket(self._mixed.axes[2], decodes), self._alphas("mixed", decodes))
        return count

    def _alphas(self, regime: str, decodes: int) -> Segments:
        """α by skewness, from 0 to 1: level below the first knot and beyond the last."""
        alphas = [0.0] * len(KNOTS) if self._skew is None else self._skew.alphas(regime, decodes)
        return Segments([0.0, *KNOTS, 2.0], [alphas[0], *alphas, alphas[-1]])

    def _report(self, grid: Grid, point: Point, names: tuple[str, ...]) -> None:
        for value, limit, name in zip(point, grid.limits, names, strict=True):
            if value > limit:
                self._flag(f"attention.{name}", value)
        if grid.reach is None:
            return
        reach = [grid.reach]
        for axis, value in zip(grid.axes[:-1], point, strict=False):
            i, share = bracket(axis, value)
            reach = [block[k] for block in reach for k in ((i, i + 1) if share else (i,))]
        if point[-1] > min(reach):
            self._flag(f"attention.{names[-1]}", point[-1])


Plane = list[list[float]]
"""Seconds by the number of decodes and by their history, at one chunk and context."""


def _over_planes(
    planes: Iterable[tuple[float, Plane]], k: int, w: float, a: int, f: float, b: int, g: float
) -> tuple[float, float]:
    """Sums over the planes around a chunk, weighted: at the mean history and at the longest.

    `k`, `a`, `b`: intervals of the number of decodes, of mean and longest history; `w`, `f`, `g`: shares of the way.
    """
    even = worst = 0.0
    for weight, plane in planes:
        for part, row in (((1.0 - w) * weight, plane[k]), (w * weight, plane[k + 1])):
            at_mean, at_top = row[a], row[b]
            even += part * (at_mean + (row[a + 1] - at_mean) * f)
            worst += part * (at_top + (row[b + 1] - at_top) * g)
    return even, worst


def _over_fresh_prompts(
    u: float, low: Plane, high: Plane, k: int, w: float, a: int, f: float, b: int, g: float
) -> tuple[float, float]:
    """The values of `_over_planes` for a chunk without context: `u` of the way from the chunk `low` to `high`."""
    low_few, low_many, high_few, high_many = low[k], low[k + 1], high[k], high[k + 1]
    w_low, u_low = 1.0 - w, 1.0 - u
    p, q, r, s = w_low * u_low, w * u_low, w_low * u, w * u
    even = p * (low_few[a] + (low_few[a + 1] - low_few[a]) * f)
    even += q * (low_many[a] + (low_many[a + 1] - low_many[a]) * f)
    even += r * (high_few[a] + (high_few[a + 1] - high_few[a]) * f)
    even += s * (high_many[a] + (high_many[a + 1] - high_many[a]) * f)
    worst = p * (low_few[b] + (low_few[b + 1] - low_few[b]) * g)
    worst += q * (low_many[b] + (low_many[b + 1] - low_many[b]) * g)
    worst += r * (high_few[b] + (high_few[b + 1] - high_few[b]) * g)
    worst += s * (high_many[b] + (high_many[b + 1] - high_many[b]) * g)
    return even, worst


NOTHING: Point = (-1.0, -1.0, -1.0, -1.0)
"""Limits that every point exceeds."""

_MIXED = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
