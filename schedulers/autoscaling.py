"""Autoscaling: how many engines a pool should have.

A policy turns what is observed of a pool into a number of engines. An `Autoscaler` then keeps it between a minimum and
a maximum, and limits how soon and how fast the number changes, as the Kubernetes Horizontal Pod Autoscaler does
(`autoscaling/v2`; `pkg/controller/podautoscaler`). Nothing here has a clock: times come in with the observations.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from workloads.registry import Registry

Metric = Literal["busy", "load", "kv_used", "running", "waiting"]
"""The number that `TargetUtilization` holds at its target."""


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The metrics of one engine that is up.

    Attributes:
        busy: share of the time since the last observation in which it was in a step.
        load: running sequences over `max_num_seqs`, the mean over that time.
        kv_used: share of KV blocks in use, now.
        running, waiting: requests that are admitted, and that wait for admission, now.
    """

    busy: float
    load: float
    kv_used: float
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a pool as an autoscaler sees it.

    Attributes:
        now: seconds. replicas: engines that the pool should have, by the decision before.
        engines: metrics of the engines that are up. starting, failed, draining: engines that start, that are down, and
            that finish their requests before they stop. The last do not count as replicas.
        queued: requests that wait because no engine is up.
        latencies: recent latencies by goal (`ttft_p99`), seconds; empty unless the policy has goals.
        min_replicas, max_replicas: the numbers that may be chosen.
    """

    now: float
    replicas: int
    engines: tuple[EngineMetrics, ...]
    starting: int = 0
    failed: int = 0
    draining: int = 0
    queued: int = 0
    latencies: Mapping[str, float] = field(default_factory=dict)
    min_replicas: int = 1
    max_replicas: int = 1_000_000


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """At most `value` engines, or `value` percent of them, may be added or removed in `period` seconds."""

    type: Literal["engines", "percent"]
    value: float
    period: float


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """The rules of one direction (`HPAScalingRules`).

    `stabilization_window`: seconds; up, the lowest of the recommendations in it counts, down, the highest. `policies`:
    limits of the rate, if any. `select`: the policy that counts, by the change that it allows.
    """

    stabilization_window: float = 0.0
    policies: tuple[RatePolicy, ...] = ()
    select: Literal["max", "min", "disabled"] = "max"


HPA_SCALE_UP: Final = ScalingRules(0.0, (RatePolicy("engines", 4, 15.0), RatePolicy("percent", 100, 15.0)))
HPA_SCALE_DOWN: Final = ScalingRules(300.0, (RatePolicy("percent", 100, 15.0),))
"""The defaults of Kubernetes."""


class Autoscaler:
    """Decides the number of engines of one pool, as `policy` recommends.

    `scale_up`, `scale_down`: the rules of each direction; None: the policy's own.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        min_replicas: int,
        max_replicas: int,
        scale_up: ScalingRules | None = None,
        scale_down: ScalingRules | None = None,
    ) -> None:
        self.policy = policy
        self.min_replicas = min_replicas
        self.max_replicas = max_replicas
        self._up = policy.scale_up if scale_up is None else scale_up
        self._down = policy.scale_down if scale_down is None else scale_down
        self._recommendations: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []  # when, and how many engines more

    def decide(self, observation: Observation) -> int:
        """The number of engines that the pool should have from now on."""
        now, current = observation.now, observation.replicas
        if not self.min_replicas <= current <= self.max_replicas:
            desired = min(max(current, self.min_replicas), self.max_replicas)
        else:
            if not self._recommendations:
                self._recommendations.append((now, current))
            desired = self._limit_rate(now, current, self._stabilise(now, current, self.policy.desired(observation)))
        if desired != current:
            self._changes.append((now, desired - current))
            longest = max((rate.period for rate in (*self._up.policies, *self._down.policies)), default=0.0)
            self._changes = [change for change in self._changes if change[0] > now - longest]
        return desired

    def _stabilise(self, now: float, current: int, recommended: int) -> int:
        """Change no further than every recommendation of a window would."""
        up, down = self._up.stabilization_window, self._down.stabilization_window
        recent = [entry for entry in self._recommendations if entry[0] > now - max(up, down)]
        lower = min([recommended, *(count for when, count in recent if when > now - up)])
        upper = max([recommended, *(count for when, count in recent if when > now - down)])
        self._recommendations = [*recent, (now, recommended)]
        return min(max(current, lower), upper)

    def _limit_rate(self, now: float, current: int, desired: int) -> int:
        """The desired number, as far as the rates of its direction allow to go there."""
        sign = 1 if desired > current else -1
        rules, bound = (self._up, self.max_replicas) if sign > 0 else (self._down, self.min_replicas)
        if desired == current or rules.select == "disabled":
            return current
        limits = []
        for rate in rules.policies:
            before = current - sum(change for when, change in self._changes if when > now - rate.period)
            if rate.type == "engines":
                limits.append(int(before + sign * rate.value))
            else:
                engines = before * (1 + sign * rate.value / 100)
                limits.append(math.ceil(engines) if sign > 0 else int(engines))
        furthest, nearest = (max, min) if sign > 0 else (min, max)
        limit = bound if not limits else furthest(limits) if rules.select == "max" else nearest(limits)
        return nearest(desired, bound, furthest(limit, current))


class ScalingPolicy(Protocol):
    """Recommends a number of engines.

    Attributes:
        scale_up, scale_down: the rules that apply unless others are given.
    """

    scale_up: ScalingRules
    scale_down: ScalingRules

    def desired(self, observation: Observation) -> int:
        """The number of engines, whatever the limits."""


def replicas_at_target(
    replicas: int,
    values: Many[float | None],
    target: float,
    tolerance: float = 0.1,
    *,
    missing_as: float | None = None,
    unready: int = 0,
) -> int:
    """The number of replicas that brings the mean of a metric to its target, as the HPA's replica calculator finds it.

    It is ⌈replicas × mean/target⌉, unless the ratio is within the tolerance of 1. Replicas without a metric dampen the
    change: they count as 0 when the others call for more, and as `missing_as` when they call for fewer. If that turns
    the direction round, nothing changes.

    Args:
        replicas: the present number. values: the metric of each replica, None where it is missing.
        missing_as: by default the target, as for a metric of pods; for a resource it is the larger of it and 100 %.
        unready: replicas that are not ready: they are left out, but count as 0 when the others call for more.
    """
    ratios = [value for value in values if value is not None]
    missing = len(values) - len(ratios)
    if not ratios:
        return replicas
    ratio = sum(ratios) / len(ratios) / target
    if not missing and not (unready and ratio > 1):
        return replicas if _within(ratio, tolerance) else math.ceil(ratio * len(ratios))
    if ratio < 1:
        ratios += [target if missing_as is None else missing_as] * missing
    elif ratio > 1:
        ratios += [0.0] * (missing + unready)
    dampened = sum(ratios) / len(ratios) / target
    if _within(dampened, tolerance) or (ratio < 1 < dampened) or (dampened < 1 < ratio):
        return replicas
    recommended = math.ceil(dampened * len(ratios))
    if (dampened < 1 and recommended > replicas) or (dampened > 1 and recommended < replicas):
        return replicas
    return recommended


def _within(ratio: float, tolerance: float) -> bool:
    return abs(1.0 - ratio) <= tolerance


class TargetUtilization:
    """Holds the mean of a metric over engines at a target, as the HPA does for a metric of pods.

    Engines that start, and failed ones, have no metric (`replicas_at_target`).
    """

    scale_up, scale_down = HPA_SCALE_UP, HPA_SCALE_DOWN

    def __init__(self, predict: Predict, target: float, metric: Metric = "load", tolerance: float = 0.1) -> None:
        _check("target", target, target > 0, "more than 0")
        _check("tolerance", tolerance, tolerance >= 0, "0 or more")
        names = ("busy", "load", "kv_used", "running", "waiting")
        _check("metric", metric, metric in names, f"one of {', '.join(names)}")
        self._target = target
        self._metric = metric
        self._tolerance = tolerance

    def desired(self, observation: Observation) -> int:
        values: list[float | None] = [getattr(engine, self._metric) for engine in observation.engines]
        values += [None] * (observation.starting + observation.failed)
        return replicas_at_target(observation.replicas, values, self._target, self._tolerance)


class QueueLength:
    """Has an engine for every `target` requests, as the HPA has for an external metric with an average value (KEDA).

    `count`: requests that are `waiting` for admission, or all that are `unfinished`.
    """

    scale_up, scale_down = HPA_SCALE_UP, HPA_SCALE_DOWN

    def __init__(
        self,
        predict: Predict,
        target: float,
        count: Literal["waiting", "unfinished"] = "waiting",
        tolerance: float = 0.1,
    ) -> None:
        _check("target", target, target > 0, "more than 0")
        _check("tolerance", tolerance, tolerance >= 0, "0 or more")
        _check("count", count, count in ("waiting", "unfinished"), "waiting or unfinished")
        self._target = target
        self._count = count
        self._tolerance = tolerance

    def desired(self, observation: Observation) -> int:
        requests = observation.queued + sum(engine.waiting for engine in observation.engines)
        if self._count == "unfinished":
            requests += sum(engine.running for engine in observation.engines)
        if _within(requests / (self._target * observation.replicas), self._tolerance):
            return observation.replicas
        return math.ceil(requests / self._target)


class Scheduled:
    """Has fixed numbers of engines by time, whatever the load.

    `schedule`: pairs of seconds, from 0 on, and engines from then on. It begins again after `period` seconds.
    """

    scale_up = scale_down = ScalingRules()

    def __init__(self, predict: Predict, schedule: Many[tuple[float, int]], period: float | None = None) -> None:
        times = [when for when, _ in schedule]
        ordered = bool(times) and times[0] == 0 and all(a < b for a, b in itertools.pairwise(times))
        _check("schedule", schedule, ordered, "pairs of seconds, from 0 on and in order, and engines")
        _check("schedule", schedule, all(count >= 1 and count == int(count) for _, count in schedule), "whole engines")
        _check("period", period, period is None or period > times[-1], "more than the last time of the schedule")
        self._times = times
        self._counts = [int(count) for _, count in schedule]
        self._period = period

    def desired(self, observation: Observation) -> int:
        now = observation.now if self._period is None else math.fmod(observation.now, self._period)
        return self._counts[bisect_right(self._times, now) - 1]


Predict = Callable[[int], Mapping[str, float]]
"""Latencies by goal (`ttft_p99`), seconds, that a number of engines would give the load of the last minutes.

Empty where there was no load.
"""


class MeetGoals:
    """Has the fewest engines that a predictor says meet the goals: the scheduling loop of a planner.

    Fewer engines are assumed to give no smaller latencies. While recent latencies miss a goal, none is removed. If no
    number meets the goals, it is the largest that may be chosen.

    Args:
        goals: limits of latencies by name (`ttft_p99`), seconds. margin: share of the goals that is left unused.
    """

    scale_up = scale_down = ScalingRules()

    def __init__(self, predict: Predict, goals: Mapping[str, float], margin: float = 0.0) -> None:
        _check("goals", goals, bool(goals) and all(limit > 0 for limit in goals.values()), "latencies and their limits")
        _check("margin", margin, 0 <= margin < 1, "0 or more and less than 1")
        self.goals = dict(goals)
        self._predict = predict
        self._margin = margin

    def desired(self, observation: Observation) -> int:
        lower, upper = observation.min_replicas, observation.max_replicas
        if any(observation.latencies.get(name, 0.0) > limit for name, limit in self.goals.items()):
            lower = min(max(lower, observation.replicas), upper)
        return self._fewest_near(min(max(observation.replicas, lower), upper), lower, upper)

    def _fewest_near(self, size: int, lower: int, upper: int) -> int:
        """The fewest engines from `lower` that meet the goals, or `upper`; sought in doubled steps from `size`."""
        enough, step = self._meets(size), 1
        while size != (lower if enough else upper):
            next_size = max(size - step, lower) if enough else min(size + step, upper)
            if self._meets(next_size) != enough:
                low, high = sorted((size, next_size))
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (low, middle) if self._meets(middle) else (middle, high)
                return high
            size, step = next_size, 2 * step
        return size

    def _meets(self, engines: int) -> bool:
        predicted = self._predict(engines)
        return all(predicted.get(name, 0.0) <= limit * (1 - self._margin) for name, limit in self.goals.items())


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, found {value}")


SCALING_POLICIES: Registry[Callable[..., Any]] = Registry(
    target_utilization=TargetUtilization, queue_length=QueueLength, scheduled=Scheduled, slo=MeetGoals
)
"""Makes a policy (`ScalingPolicy`), given a predictor and its parameters by name. Each pool has one of its own."""
