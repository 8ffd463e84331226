"""A window: one replication of a candidate, reduced to what a verdict needs; a trial: a candidate by its windows."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reports.metrics import spread, weighted_spread
from scenarios.fields import Goal, MeasureSpec
from twin.executors.executor import Executor
from twin.planning.confidence import Floats, probability
from twin.planning.question import Document
from twin.planning.space import Candidate
from twin.serving.plan.plan import Draw, ServingPlan
from twin.serving.results.report import overload
from twin.serving.results.summary import RequestLatencies, Run, pooled_gaps, request_latency, summarise, within
from twin.serving.results.uncertainty import combine
from twin.serving.run.simulation import Simulation, realisation
from workloads.errors import BadInput


@dataclass(frozen=True)
class Window:
    """One run to make. `key`: its name in a run folder. `replication`, `draw`: as in `Simulation`."""

    key: str
    plan: ServingPlan
    goals: tuple[Goal, ...]
    replication: int
    draw: Draw = None


class CpuLimitReached(Exception):
    """A window is missing, and a plan has used the CPU seconds that it may."""


@dataclass
class Simulations:
    """The windows of a plan, each simulated once.

    Args:
        store: windows by key that have been simulated; `save` is called with each new one.
        executor: runs windows. advance: called for each window, with its key.
        cpu_limit: CPU seconds of this process and of the workers on windows, after which no window begins.

    Attributes:
        requests: in all windows that evaluators asked for.
    """

    store: dict[str, Document]
    save: Callable[[str, Document], None]
    executor: Executor
    advance: Callable[[str], object] = lambda text: None
    cpu_limit: float = math.inf
    requests: int = 0
    _clocks: dict[int, float] = field(default_factory=dict, init=False)  # CPU seconds by process

    def results(self, windows: Sequence[Window]) -> list[Document]:
        """The results of windows, simulated unless they are in the store; may raise `CpuLimitReached`."""
        by_key = {window.key: window for window in windows}
        missing = [window for key, window in by_key.items() if key not in self.store]
        if missing:
            self._check_limit()
            with self.executor.each_as_done(_clocked_window, missing) as results:
                for window, (result, process, seconds) in results:
                    self._clocks[process] = seconds
                    self.save(window.key, result)
                    self.store[window.key] = result
                    self.advance(window.key)
                    self._check_limit()
        return [self.store[window.key] for window in windows]

    def _check_limit(self) -> None:
        self._clocks[os.getpid()] = time.process_time()
        if sum(self._clocks.values()) >= self.cpu_limit:
            raise CpuLimitReached


def _clocked_window(window: Window) -> tuple[Document, int, float]:
    """The result of a window, the process that simulated it, and the CPU seconds of that process so far."""
    return run_window(window), os.getpid(), time.process_time()


def run_window(window: Window) -> Document:
    """Simulate a window.

    Returns:
        `summary` as of a simulation; `values`, the metric of each goal (None: no request counts); `excess` and
        `variance` of each goal (`confidence`); `overload`, as in a simulation; `requests`, simulated; `refused`, a
        reason why it cannot be simulated, beside nothing else.
    """
    try:
        run = Simulation(window.plan, window.replication, window.draw).run()
    except BadInput as error:
        return {"refused": str(error)}
    measure = window.plan.scenario.measure
    summary = summarise(run, measure)
    metrics = [_goal(goal, window, run, summary) for goal in window.goals]
    return {
        "summary": summary,
        **{name: [metric[i] for metric in metrics] for i, name in enumerate(("values", "excess", "variance"))},
        "overload": overload(run, window.plan),
        "requests": window.plan.requests,
        "outside": run.outside,
    }


def _goal(goal: Goal, window: Window, run: Run, summary: Document) -> tuple[float | None, float, float]:
    """A goal's metric, its excess, and the variance of that for independent requests that just meet the goal."""
    measure = window.plan.scenario.measure
    if goal.metric == "itl":
        gaps, weights = pooled_gaps(run.logs, measure)
        return _latency(goal, gaps, weights)
    if goal.at_most:
        values = RequestLatencies(run.columns, measure).counted()[goal.metric]
        if goal.of is not None:
            values = _of_class(goal, window, run, measure)
        return _latency(goal, values, None)
    if goal.metric == "goodput":
        return _goodput(goal, summary)
    rate, seconds = summary[goal.metric], summary["duration"]
    if rate is None:
        return None, math.inf, 0.0
    per_request = summary["output_tokens"] / max(summary["requests"], 1) if goal.metric[0] == "o" else 1.0
    return rate, (goal.limit - rate) * seconds, goal.limit * seconds * per_request


def _latency(goal: Goal, values: Floats, weights: NDArray[np.int64] | None) -> tuple[float | None, float, float]:
    weights = np.ones(len(values), dtype=np.int64) if weights is None else weights
    count = int(weights.sum())
    if not count:
        return None, 0.0, 0.0
    if goal.quantile is None:
        mean = float((values * weights).sum()) / count
        variance = float(((values - mean) ** 2 * weights).sum())
        return mean, (mean - goal.limit) * count, variance
    q = 100 * goal.quantile
    quantiles = spread(values, (q,)) if weights.max() == 1 == weights.min() else weighted_spread(values, weights, (q,))
    assert quantiles is not None
    expected = (1 - goal.quantile) * count
    over = float(weights[values > goal.limit].sum())
    return quantiles[f"p{q:g}"], over - expected, expected * goal.quantile


def _goodput(goal: Goal, summary: Document) -> tuple[float | None, float, float]:
    """The share of the requests that count which meet all of `measure.slo`."""
    requests = summary["requests"]
    if not requests:
        return None, math.inf, 0.0
    good = round(summary["goodput"] * summary["duration"])
    return good / requests, goal.limit * requests - good, goal.limit * (1 - goal.limit) * requests


def _of_class(goal: Goal, window: Window, run: Run, measure: MeasureSpec) -> Floats:
    """Latencies of the requests of one task or model."""
    classes = {
        request.id: goal.of in (request.task, request.model)
        for request, _ in realisation(window.plan, window.replication)
    }
    ids = np.frombuffer(run.columns.id, dtype=np.int64)
    rows = np.array([classes[i] for i in ids.tolist()], dtype=bool) & within(run.columns.last_token, measure)
    values = request_latency(goal.metric, run.columns, measure)[rows]
    return values[~np.isnan(values)]


def describe_overload(load: Document) -> str:
    """The reason why a candidate is saturated, in words."""
    arrive, start = load["arrival_rate"], load["service_rate"]
    engines: list[Any] = load["engines"]
    names = engines[0] if len(engines) == 1 else f"{engines[0]} … {engines[-1]}"
    return f"saturated: {arrive:.3g} requests/s arrive at {names} and {start:.3g} start; {load['waiting']} wait"


@dataclass(frozen=True)
class Horizon:
    """The lengths of windows.

    `short`, `long`: requests of a window. `warmup`: seconds at its beginning that do not count. `span`: seconds for
    which goals are to be met.
    """

    short: int
    long: int
    warmup: float
    span: float


@dataclass(frozen=True)
class Trial:
    """The evaluation of a candidate by simulated windows.

    Attributes:
        probability: that a span meets all goals at the best estimate of the step times; 0 for a saturated system.
        windows: long ones, or a single short one.
        decided: further windows would not change it. meets: all goals, as far as is known.
        reason: why not; empty for a candidate that meets its goals.
        shifts: of the mean excesses, by each draw of the step times that was simulated, shape (draws, goals).
        draws: their number. sure: share of all draws under which goals hold; those that were not simulated count too.
        seed: of the windows that confirm a candidate; None: the question's.
    """

    candidate: Candidate
    probability: float = 0.0
    windows: Sequence[Document] = ()
    decided: bool = True
    meets: bool = False
    reason: str = ""
    saturated: bool = False
    shifts: Sequence[Sequence[float]] = ()
    draws: int = 0
    sure: float | None = None
    seed: int | None = None

    @property
    def failed(self) -> bool:
        """True for a candidate that misses its goals for certain."""
        return self.decided and not self.meets

    @cached_property
    def _combined(self) -> tuple[Document, Document]:
        return combine([window["summary"] for window in self.windows]) if self.windows else ({}, {})

    @property
    def summary(self) -> Document:
        """Metrics, as of a simulation with a replication for each window."""
        return self._combined[0]

    @property
    def intervals(self) -> Document:
        """Their confidence intervals."""
        return self._combined[1]

    @property
    def excess(self) -> Floats:
        """The excess of each goal in each window, shape (windows, goals)."""
        return np.array([window["excess"] for window in self.windows])

    def long_run_probability(self) -> float:
        """The probability that goals are met in the long run, over windows and draws; 0 for a saturated system."""
        if self.saturated or not self.windows:
            return 0.0
        return probability(self.excess, math.inf, np.array(self.shifts) if self.draws else None)

    def value(self, goal: int) -> float | None:
        """The mean over windows of a goal's metric; None where no request counts."""
        values = [window["values"][goal] for window in self.windows]
        return None if None in values else float(np.mean(values))

    def worst(self, goals: Sequence[Goal]) -> tuple[float, Goal]:
        """The largest ratio of a metric to its limit, and its goal."""
        ratios = [
            (math.inf if (value := self.value(i)) is None else goal.ratio(value), goal) for i, goal in enumerate(goals)
        ]
        return max(ratios, key=lambda pair: pair[0])


def in_unit(goal: Goal, value: float) -> str:
    """A goal's value with its unit."""
    if goal.at_most:
        return f"{1e3 * value:.4g} ms" if value < 1 else f"{value:.4g} s"
    return f"{100 * value:.4g} %" if goal.metric == "goodput" else f"{value:.4g}/s"
