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

from latency_models.interpolation import bracket, level
from latency_models.sources.kernel_tables.grids import Flag, Grid, Point, make_grid
from latency_models.sources.kernel_tables.skew import KNOTS, SkewFit
from latency_models.sources.kernel_tables.tables import AttentionTable
from schedulers.batches import Batch


class DecodeCurve:
    """Attention for one number of decodes: seconds by history, and α by skewness.

    Attributes:
        histories, times: points of the curve, cached tokens and seconds.
        reach: the longest measured history.
        alphas: α at `skew.KNOTS`.
    """

    __slots__ = ("alphas", "histories", "reach", "times")

    def __init__(self, histories: list[float], times: list[float], reach: float, alphas: list[float]) -> None:
        self.histories, self.times, self.reach, self.alphas = histories, times, reach, alphas


class AttentionTimes:
    """Seconds of attention in all layers of one step.

    Args:
        scale: factor from the table's microseconds to seconds of all layers.
        flag: called for values outside the table.
    """

    def __init__(self, table: AttentionTable, skew: SkewFit | None, scale: float, flag: Flag) -> None:
        regimes = table.regimes()
        self._decode = make_grid(regimes.decode, scale)
        self._prefill = make_grid(regimes.prefill, scale)
        self._mixed = make_grid(regimes.mixed, scale)
        self._floor = min(regimes.prefill.values()) * scale
        self._skew, self._flag = skew, flag
        self._curves: dict[int, DecodeCurve] = {}
        self._mixed_alphas: dict[int, list[float]] = {}

    # -- decodes alone -----------------------------------------------------------------------------------------------

    def decode(self, decodes: int, kv: int, longest: int) -> float:
        """Seconds of decodes alone.

        This is called for every simulated step, so `bracket` is written out twice.

        Args:
            kv: tokens that all decodes attend to.
            longest: tokens that the longest attends to.
        """
        curve = self._curves.get(decodes) or self._curve(decodes)
        histories, times = curve.histories, curve.times
        last = len(histories) - 2
        mean, top = kv / decodes - 1.0, longest - 1.0
        if top > curve.reach:
            self._flag("attention.kv_decode", top)
        i = bisect_right(histories, mean) - 1
        if i > last:
            i = last
        start, low = histories[i], times[i]
        even = low + (times[i + 1] - low) * (mean - start) / (histories[i + 1] - start)
        if top <= mean:
            return even
        i = bisect_right(histories, top) - 1
        if i > last:
            i = last
        start, low = histories[i], times[i]
        worst = low + (times[i + 1] - low) * (top - start) / (histories[i + 1] - start)
        return even + level(KNOTS, curve.alphas, 1.0 - mean / top) * (worst - even)

    def _curve(self, decodes: int) -> DecodeCurve:
        """The table at one number of decodes, cached, since a run of steps uses the same one."""
        grid = self._decode
        counts, histories = grid.axes
        k, share = bracket(counts, decodes)
        times = [a + (b - a) * share for a, b in zip(grid.times[k], grid.times[k + 1], strict=True)]
        if decodes > grid.limits[0]:
            self._flag("attention.n_decode", decodes)
        reach = grid.limits[1] if grid.reach is None else min(grid.reach[k : k + 2] if share else grid.reach[k : k + 1])
        curve = self._curves[decodes] = DecodeCurve(histories, times, reach, self._alphas("pure", decodes))
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
        tokens, context = chunks[0] if len(chunks) == 1 else max(chunks)
        if not decodes:
            return self._together(chunks) if len(chunks) > 1 else self._prompt(tokens, context)
        time = self._beside(tokens, context, decodes, kv / decodes - 1.0, longest - 1.0)
        if len(chunks) > 1:
            time += max(self._together(chunks) - self._prompt(tokens, context), 0.0)
        return time

    def _together(self, chunks: list[tuple[int, int]]) -> float:
        """Seconds of several chunks without decodes."""
        slowest = work = 0.0
        tokens = 0
        for count, context in chunks:
            tokens += count
            work += count * (context + 0.5 * count)
            alone = self._prompt(count, context)
            if alone > slowest:
                slowest = alone
        even = work / tokens - 0.5 * tokens
        if even >= 0:
            together = self._prompt(tokens, even)
        else:
            together = max(2.0 * self._prompt(tokens, 0) - self._prompt(tokens, -even), self._floor)
        return together if together > slowest else slowest

    def _prompt(self, tokens: float, context: float) -> float:
        """Seconds of one chunk without decodes."""
        grid = self._prefill
        if tokens > grid.limits[0] or context > grid.limits[1] or grid.reach is not None:
            self._report(grid, (tokens, context), ("prefill_chunk", "kv_prefill"))
        sizes, contexts = grid.axes
        i, u = bracket(sizes, tokens)
        j, v = bracket(contexts, context)
        low, high = grid.times[i], grid.times[i + 1]
        at_low = low[j] + (low[j + 1] - low[j]) * v
        time: float = at_low + (high[j] + (high[j + 1] - high[j]) * v - at_low) * u
        return time

    def _beside(self, tokens: int, context: float, decodes: int, mean: float, top: float) -> float:
        """Seconds of one chunk and of decodes with this mean and longest history."""
        grid = self._mixed
        beyond = grid.limits
        outside = tokens > beyond[0] or context > beyond[1] or decodes > beyond[2] or top > beyond[3]
        if outside or grid.reach is not None:
            self._report(grid, (tokens, context, decodes, top), _MIXED)
        sizes, contexts, counts, histories = grid.axes
        i, u = bracket(sizes, tokens)
        j, v = bracket(contexts, context)
        k, w = bracket(counts, decodes)
        a, f = bracket(histories, mean)
        b, g = bracket(histories, top)
        even = worst = 0.0
        for share, plane in ((1.0 - u, grid.times[i]), (u, grid.times[i + 1])):
            for part, rows in (((1.0 - v) * share, plane[j]), (v * share, plane[j + 1])):
                for weight, row in (((1.0 - w) * part, rows[k]), (w * part, rows[k + 1])):
                    even += weight * (row[a] + (row[a + 1] - row[a]) * f)
                    worst += weight * (row[b] + (row[b + 1] - row[b]) * g)
        if top <= mean:
            return even
        alphas = self._mixed_alphas.get(decodes)
        if alphas is None:
            alphas = self._mixed_alphas[decodes] = self._alphas("mixed", decodes)
        return even + level(KNOTS, alphas, 1.0 - mean / top) * (worst - even)

    # -- both --------------------------------------------------------------------------------------------------------

    def _alphas(self, regime: str, decodes: int) -> list[float]:
        return [0.0] * len(KNOTS) if self._skew is None else self._skew.alphas(regime, decodes)

    def _report(self, grid: Grid, point: Point, names: tuple[str, ...]) -> None:
        """Flag the axes on which a point lies outside the measured range."""
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


_MIXED = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
