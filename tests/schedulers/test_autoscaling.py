"""Autoscaling policies compared with Kubernetes: its documented examples, its own tables of tests, and brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.autoscaling import (
    HPA_SCALE_DOWN,
    HPA_SCALE_UP,
    Autoscaler,
    EngineMetrics,
    MeetGoals,
    Observation,
    QueueLength,
    RatePolicy,
    ScalingRules,
    Scheduled,
    TargetUtilization,
    replicas_at_target,
)


def nothing(engines: int) -> dict[str, float]:
    return {}


def observation(now: float, replicas: int, loads: list[float] | None = None, **changes: Any) -> Observation:
    loads = [0.5] * replicas if loads is None else loads
    engines = tuple(EngineMetrics(load, load, load, int(load), int(load)) for load in loads)
    return Observation(now, replicas, engines, **changes)


# The cases of kubernetes/pkg/controller/podautoscaler/replica_calculator_test.go, by name: pods now, metric of each
# (None: missing), target, pods expected. Resources are in shares of what a pod requests.
PODS = [
    ("documented: 200m where 100m are wanted", 1, [0.2], 0.1, 2),
    ("documented: 50m where 100m are wanted", 2, [0.05, 0.05], 0.1, 1),
    ("ScaleUp", 3, [0.3, 0.5, 0.7], 0.3, 5),
    ("ScaleUpCM", 3, [20.0, 10.0, 30.0], 15.0, 4),
    ("ScaleUpCMUnreadyHotCpuNoLessScale", 3, [50.0, 10.0, 30.0], 15.0, 6),
    ("ScaleUpCMUnreadyHotCpuScaleWouldScaleDown", 3, [50.0, 15.0, 30.0], 15.0, 7),
    ("ScaleUpCMExternal", 1, [8.6], 4.4, 2),
    ("ScaleDown", 5, [0.1, 0.3, 0.5, 0.25, 0.25], 0.5, 3),
    ("ScaleDownCM", 5, [12.0] * 5, 20.0, 3),
    ("Tolerance", 3, [1.01 / 0.9, 1.03 / 1.0, 1.02 / 1.1], 1.0, 3),
    ("ToleranceCM", 3, [20.0, 21.0, 21.0], 20.0, 3),
    ("SuperfluousMetrics", 4, [4.0, 9.5, 3.0, 7.0], 1.0, 24),
    ("MissingMetrics", 4, [0.4, 0.095, None, None], 1.0, 3),
    ("MissingMetricsNoChangeEq", 2, [1.0, None], 1.0, 2),
    ("MissingMetricsNoChangeGt", 2, [1.9, None], 1.0, 2),
    ("MissingMetricsNoChangeLt", 2, [0.6, None], 1.0, 2),
]


# The same file: pods that are not ready, with a metric or without.
UNREADY = [
    ("ScaleUpUnreadyLessScale", 3, [0.5, 0.7], 0.3, 1, 4),
    ("ScaleUpUnreadyNoScale", 3, [0.4], 0.3, 2, 3),
    ("MissingMetricsUnreadyChange", 3, [0.45, None], 0.5, 1, 3),
    ("MissingMetricsUnreadyScaleUp", 3, [2.0, None], 0.5, 1, 4),
    ("MissingMetricsUnreadyScaleDown", 4, [0.1, 0.1, None], 0.5, 1, 3),
]


CASES = {name: (*case[:3], 0, case[3]) for name, *case in PODS} | {name: case for name, *case in UNREADY}


@pytest.mark.parametrize(("pods", "values", "target", "unready", "expected"), CASES.values(), ids=CASES)
def test_replica_calculator(pods: int, values: list[float | None], target: float, unready: int, expected: int) -> None:
    assert replicas_at_target(pods, values, target, missing_as=max(target, 1.0), unready=unready) == expected


def test_engines_that_start_are_replicas_without_a_metric() -> None:
    policy = TargetUtilization(nothing, target=0.5)
    assert policy.desired(observation(0.0, 2, [1.0], starting=1)) == 2, "⌈2 × (1.0 + 0)/2 / 0.5⌉"
    assert policy.desired(observation(0.0, 3, [1.5], starting=1, failed=1)) == 3
    assert policy.desired(observation(0.0, 2, [0.1], starting=1)) == math.ceil(2 * (0.1 + 0.5) / 2 / 0.5)
    assert policy.desired(observation(0.0, 2, [], starting=2)) == 2, "without any metric nothing changes"


@pytest.mark.parametrize(
    ("replicas", "waiting", "target", "expected"),
    [(3, 8600, 2150, 4), (5, 8600, 2867, 3), (3, 8600, 2900, 3), (3, 0, 2, 0)],
    ids=["ScaleUpPerPodCMExternal", "ScaleDownPerPodCMExternal", "TolerancePerPodCMExternal", "none"],
)
def test_queue_length_is_an_external_metric_with_an_average_value(
    replicas: int, waiting: int, target: float, expected: int
) -> None:
    assert QueueLength(nothing, target).desired(observation(0.0, replicas, [], queued=waiting)) == expected


# Of kubernetes/pkg/controller/podautoscaler/horizontal_test.go: events of the last `period` seconds (added, removed),
# a rate, pods now, desired, and expected, with a minimum.
RATES = [
    ((), (1, 5, 9), RatePolicy("engines", 115, 120), 100, 0, 1, 1),
    ((), (1, 5, 9), RatePolicy("engines", 130, 120), 100, 0, 5, 5),
    ((), (1, 5, 9), RatePolicy("percent", 100, 120), 100, 2, 5, 5),
    ((), (1, 5, 9), RatePolicy("engines", 5, 120), 100, 2, 1, 100),
    ((), (2, 4, 6), RatePolicy("percent", 50, 120), 100, 0, 1, 56),
    ((), (10, 10, 10), RatePolicy("percent", 10, 120), 100, 0, 1, 100),
    ((), (10, 10, 10), RatePolicy("percent", 1000, 120), 10, 5, 1, 5),
]


@pytest.mark.parametrize(("added", "removed", "rate", "pods", "desired", "minimum", "expected"), RATES)
def test_rates(
    added: tuple[int, ...], removed: tuple[int, ...], rate: RatePolicy, pods: int, desired: int, minimum: int,
    expected: int,
) -> None:  # fmt: skip
    policy = Scheduled(nothing, [(0, max(desired, 1))])
    rules = ScalingRules(0.0, (rate,))
    autoscaler = Autoscaler(policy, minimum, 1000, scale_up=rules, scale_down=rules)
    autoscaler._changes = [(100.0, count) for count in added] + [(100.0, -count) for count in removed]
    assert autoscaler.decide(observation(200.0, pods)) == expected


def test_defaults_double_or_add_four_in_15_seconds() -> None:
    autoscaler = Autoscaler(Scheduled(nothing, [(0, 100)]), 1, 1000, HPA_SCALE_UP, HPA_SCALE_DOWN)
    result, replicas = [], 1
    for sync in range(8):
        replicas = autoscaler.decide(observation(15.0 * sync, replicas))
        result.append(replicas)
    assert result == [5, 10, 20, 40, 80, 100, 100, 100]


COUNTS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@given(COUNTS, st.sampled_from([0.0, 10.0, 15.0, 47.0, 300.0]), st.sampled_from([0.0, 15.0, 60.0, 300.0]))
def test_stabilisation_is_what_all_of_a_window_allow(counts: list[int], up: float, down: float) -> None:
    """Brute force over the whole history: no higher than the highest of the down window, no lower than the lowest."""
    schedule = Scheduled(nothing, [(15.0 * i, count) for i, count in enumerate(counts)])
    autoscaler = Autoscaler(schedule, 1, 12, ScalingRules(up), ScalingRules(down))
    replicas = 4
    history = [(0.0, 4)]
    for i, count in enumerate(counts):
        now = 15.0 * i
        history.append((now, count))
        lowest = min(count for when, count in history if when > now - up or (when, count) == history[-1])
        highest = max(count for when, count in history if when > now - down or (when, count) == history[-1])
        expected = lowest if replicas < lowest else highest if replicas > highest else replicas
        replicas = autoscaler.decide(observation(now, replicas))
        assert replicas == expected


def test_limits_hold_even_for_what_was_there_before() -> None:
    policy = TargetUtilization(nothing, target=0.5)
    assert Autoscaler(policy, 1, 4).decide(observation(0.0, 9)) == 4
    assert Autoscaler(policy, 3, 4).decide(observation(0.0, 2)) == 3
    assert Autoscaler(policy, 1, 4).decide(observation(0.0, 2, [9.0, 9.0])) == 4
    disabled = ScalingRules(select="disabled")
    assert Autoscaler(policy, 1, 4, scale_up=disabled).decide(observation(0.0, 2, [9.0, 9.0])) == 2


@pytest.mark.parametrize(("now", "expected"), [(0.0, 2), (59.9, 2), (60.0, 5), (99.0, 5), (100.0, 2), (161.0, 5)])
def test_schedule_repeats(now: float, expected: int) -> None:
    assert Scheduled(nothing, [(0, 2), (60, 5)], period=100.0).desired(observation(now, 1)) == expected


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_goals_are_met_by_the_fewest_engines(required: int, now: int, minimum: int, span: int) -> None:
    maximum = minimum + span
    queried: list[int] = []

    def predict(engines: int) -> dict[str, float]:
        queried.append(engines)
        return {"ttft_p99": 0.9 if engines >= required else 1.1}

    result = MeetGoals(predict, {"ttft_p99": 1.0}).desired(
        observation(0.0, now, min_replicas=minimum, max_replicas=maximum)
    )
    assert result == min(max(required, minimum), maximum)
    assert all(minimum <= engines <= maximum for engines in queried)
    assert len(queried) <= 2 * math.log2(span + 1) + 3, "it looks at few"


def test_no_engine_is_removed_while_a_goal_is_missed() -> None:
    def predict(engines: int) -> dict[str, float]:
        return {"ttft_p99": 0.1}

    policy = MeetGoals(predict, {"ttft_p99": 1.0})
    assert policy.desired(observation(0.0, 3, latencies={"ttft_p99": 2.0}, max_replicas=8)) == 3
    assert policy.desired(observation(0.0, 3, latencies={"ttft_p99": 0.5}, max_replicas=8)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TargetUtilization(nothing, target=0.0), "target: expected more than 0, found 0"),
        (lambda: TargetUtilization(nothing, target=1.0, metric="heat"), "metric: expected one of busy"),  # type: ignore[arg-type]
        (lambda: Scheduled(nothing, [(5, 1)]), "schedule: expected pairs of seconds, from 0 on"),
        (lambda: Scheduled(nothing, [(0, 1.5)]), "schedule: expected whole engines"),  # type: ignore[list-item]
        (lambda: Scheduled(nothing, [(0, 1), (9, 2)], period=9), "period: expected more than the last time"),
        (lambda: MeetGoals(nothing, {}), "goals: expected latencies"),
    ],
)
def test_wrong_parameters_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
