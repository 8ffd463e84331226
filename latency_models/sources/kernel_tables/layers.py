"""Everything in a step except attention: linear layers by rows, the head by sequences, experts, collectives.

Times are seconds of a whole step of the model, precomputed for every count up to the largest measured one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from copy import deepcopy

from latency_models.deployment.models import ExpertFFN, Model
from latency_models.interpolation import Flag, bracket, line_through, make_grid
from latency_models.sources.kernel_tables.settings import KernelTableSettings
from latency_models.sources.kernel_tables.tables import Curve, KernelTables
from workloads.errors import BadInput

ONCE_A_STEP = ("embedding", "final_layernorm")
TWICE_A_LAYER = ("layernorm",)
FFN = ("gate_up_proj", "act_fn", "down_proj")
"""Parts of a dense FFN, which an MoE block replaces. All other entries of a table occur once in each layer."""

KERNELS_OF_ATTENTION, KERNELS_OF_EXPERTS = 2, 4
"""Kernels of an attention layer and of an MoE block, for `kernels_a_step`."""


class ByCount:
    """Seconds by a whole number of rows or sequences.

    Beyond the largest measured count, time continues along the line through that point and the one at half of it. The
    last two would be a poor guide where times climb in stairs, since both may lie on one tread.
    """

    def __init__(self, seconds: list[float], name: str, flag: Flag) -> None:
        self.seconds = seconds
        self._name = name
        self._flag = flag

    def __deepcopy__(self, memo: dict[int, object]) -> ByCount:
        return ByCount(self.seconds, self._name, deepcopy(self._flag, memo))  # the seconds never change

    def at(self, count: int) -> float:
        """Seconds for a count; 0 for none."""
        try:
            return self.seconds[count]
        except IndexError:
            self._flag(self._name, count)
            times = self.seconds
            last = len(times) - 1
            half = last // 2
            return times[last] + (times[last] - times[half]) * (count - last) / (last - half)


def linear_layers(tables: KernelTables, settings: KernelTableSettings, model: Model, flag: Flag) -> ByCount:
    """Seconds of all row-by-row layers of a step, with the collectives of tensor parallelism."""
    dense_layers = model.layers - model.expert_layers
    if dense_layers and not any(name in tables.dense for name in FFN):
        expected = f"expected one of {', '.join(FFN)}, since {dense_layers} layers of {model.name} are dense"
        raise BadInput(expected, field="dense", value=sorted(tables.dense), file=tables.provenance.source)
    seconds = _sum(tables.dense, _occurrences(tables, model), settings)
    link = settings.communication
    if link is not None and settings.tensor_parallel > 1:
        # Two all-reduces a layer, after the projections of attention and FFN, and one after the embedding.
        for rows in range(1, len(seconds)):
            elements = rows * model.hidden_size
            seconds[rows] += (2 * model.layers + 1) * link.all_reduce(settings.tensor_parallel, elements)
    return ByCount(_padded(seconds, settings.capture_sizes or ()), "dense.tokens", flag)


def head(tables: KernelTables, settings: KernelTableSettings, model: Model, flag: Flag) -> ByCount:
    """Seconds of LM head and sampler by sequences, with gathering the logits of a split vocabulary."""
    seconds = _sum(tables.per_sequence, dict.fromkeys(tables.per_sequence, 1), settings)
    link = settings.communication
    if link is not None and settings.tensor_parallel > 1:
        for count in range(1, len(seconds)):
            seconds[count] += link.all_gather(settings.tensor_parallel, count * model.vocabulary)
    return ByCount(seconds, "per_sequence.sequences", flag)


def distinct_experts(experts: int, per_token: int, tokens: int, ranks: int) -> float:
    """Expected experts of one rank with a token, under uniform routing: E/N · (1 - (1 - k/E)^n)."""
    return experts / ranks * (1.0 - (1.0 - per_token / experts) ** tokens)


def kernels_a_step(tables: KernelTables, model: Model) -> int:
    """Minimum number of kernels of a step: each layer one, attention two, an MoE block four."""
    return (
        sum(_occurrences(tables, model).values())
        + len(tables.per_sequence)
        + KERNELS_OF_ATTENTION * model.layers
        + KERNELS_OF_EXPERTS * model.expert_layers
    )


def _occurrences(tables: KernelTables, model: Model) -> dict[str, int]:
    times = dict.fromkeys(tables.dense, model.layers)
    special = dict.fromkeys(ONCE_A_STEP, 1) | dict.fromkeys(TWICE_A_LAYER, 2 * model.layers)
    special |= dict.fromkeys(FFN, model.layers - model.expert_layers)
    return {name: special.get(name, count) for name, count in times.items()}


class ExpertTimes:
    """Seconds of all MoE blocks of a step, by the tokens of all ranks that share the experts.

    A table of one rank stands for others that were not measured, with a `note`. There, n tokens are n·k rows for as
    many experts as get any; a rank of N gets n·k/N rows for its own, as n/N tokens of the table are.
    """

    def __init__(self, tables: KernelTables, settings: KernelTableSettings, model: Model, flag: Flag) -> None:
        assert isinstance(model.ffn, ExpertFFN)
        self._ffn = model.ffn
        self._settings = settings
        self._flag = flag
        ranks = settings.expert_ranks
        points = tables.moe.of_degree(ranks) if tables.moe is not None else {}
        self._share = 1
        self.note = ""
        if not points and tables.moe is not None and set(tables.moe.ep) == {1}:
            points = tables.moe.of_degree(1)
            self._share = ranks
            self.note = (
                f"experts were measured on one rank: each of {ranks} is taken to have 1/{ranks} of the tokens, for as "
                "many of its own experts as get any"
            )
        if not points:
            measured = sorted(set(tables.moe.ep)) if tables.moe is not None else None
            expected = (
                f"expected a table of MoE blocks for {ranks} expert-parallel ranks, since {model.name} has experts"
            )
            raise BadInput(expected, field="moe.ep", value=measured, file=tables.provenance.source)
        self._layers = model.expert_layers
        self._grid = make_grid(points, self._layers * 1e-6 * settings.time_scale)
        self._hidden = model.hidden_size
        self._known: dict[int, float] = {}

    def at(self, tokens: int) -> float:
        """Seconds for the tokens of all ranks."""
        seconds = self._known.get(tokens)
        return self._work_out(tokens) if seconds is None else seconds

    def _work_out(self, tokens: int) -> float:
        ffn, grid = self._ffn, self._grid
        active = distinct_experts(ffn.experts, ffn.experts_per_token, tokens, self._settings.expert_ranks)
        rows = max(tokens / self._share, grid.axes[0][0])
        for value, limit, name in zip((rows, active), grid.limits, ("tokens", "activated_experts"), strict=True):
            if value > limit:
                self._flag(f"moe.{name}", value)
        i, u = bracket(grid.axes[0], rows)
        j, v = bracket(grid.axes[1], active)
        low, high = (row[j] + (row[j + 1] - row[j]) * v for row in grid.times[i : i + 2])
        seconds = low + (high - low) * u
        link = self._settings.communication
        if link is not None and self._settings.data_parallel > 1:
            # Each rank gets every rank's rows before its experts, and gives the sums back after (all-gather and
            # reduce-scatter, vLLM's default).
            exchange = link.all_gather(self._settings.ranks, tokens * self._hidden)
            seconds += self._layers * 2 * exchange
        self._known[tokens] = seconds
        return float(seconds)


def _sum(curves: Mapping[str, Curve], times: Mapping[str, int], settings: KernelTableSettings) -> list[float]:
    columns = [
        [times[name] * time for time in _by_count(curve, settings.row_tile)]
        for name, curve in curves.items()
        if times[name]
    ]
    scale = 1e-6 * settings.time_scale
    return [sum(column) * scale for column in zip(*columns, strict=False)]


def _by_count(curve: Curve, tile: int) -> list[float]:
    """Microseconds at 0 (none), 1, ... to the last measured count; below the first, as at the first."""
    points = sorted(zip(curve.rows, curve.time_us, strict=True))
    counts = [count for count, _ in points]
    times = [0.0]
    for count in range(1, counts[-1] + 1):
        after = bisect_left(counts, count)
        end, at_end = points[after]
        start, at_start = points[max(after - 1, 0)]
        if end - start <= tile or after == 0:
            times.append(at_end)
        else:
            times.append(line_through((start, at_start), (end, at_end), count))
    return times


def _padded(seconds: list[float], sizes: Sequence[int]) -> list[float]:
    """Seconds by count, padded: up to the largest captured size, a count takes the time of the next size."""
    sizes = [size for size in sizes if size < len(seconds)]
    padded = list(seconds)
    for count in range(1, sizes[-1] + 1 if sizes else 1):
        padded[count] = seconds[sizes[bisect_left(sizes, count)]]
    return padded
