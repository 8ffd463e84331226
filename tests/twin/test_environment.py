"""The environment's additions to SimPy: events at absolute times, their order, and alarms."""

from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy.events import Event

from twin.environment import Alarm, Environment, Priority

Process = Generator[Event, object, None]


@given(st.floats(0.0, 10.0), st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=50))
def test_an_event_happens_at_exactly_its_time(start: float, durations: list[float]) -> None:
    """The end of a sum of durations, which `now + (end - now)` does not always hit."""
    env, woke = Environment(), []
    end = list(accumulate(durations, initial=start))[-1]

    def sleeper() -> Process:
        yield env.at(start)
        yield env.at(end)
        woke.append(env.now)

    env.process(sleeper())
    env.run()
    assert woke == [end]


def test_simultaneous_events_go_by_priority_and_then_in_the_order_of_scheduling() -> None:
    env, log = Environment(), []

    def process(name: str, priority: int) -> Process:
        yield env.at(1.0, priority)
        log.append(name)

    for name, priority in (
        ("late", Priority.LATE), ("engine 1", Priority.STEP_END + 1), ("engine 0", Priority.STEP_END),
        ("outage", Priority.OUTAGE), ("first arrival", Priority.ARRIVAL), ("second arrival", Priority.ARRIVAL),
        ("SimPy's", Priority.NORMAL),
    ):  # fmt: skip
        env.process(process(name, priority))
    env.run()
    assert log == ["SimPy's", "first arrival", "second arrival", "outage", "engine 0", "engine 1", "late"]


def test_an_event_that_a_process_waits_for_is_triggered() -> None:
    env, log = Environment(), []
    wake_up = env.event()

    def sleeper() -> Process:
        yield wake_up
        log.append(env.now)

    env.process(sleeper())
    assert env.at(2.5, Priority.STEP_END, wake_up) is wake_up
    env.run()
    assert log == [2.5]


def test_the_past_is_refused() -> None:
    env = Environment()
    env.run(until=2.0)
    with pytest.raises(AssertionError, match=r"cannot wake at 1\.0: it is already 2\.0"):
        env.at(1.0)


@pytest.mark.parametrize(
    ("when", "priority", "advances"),
    [
        (0.5, Priority.LATE, True),
        (1.0, Priority.OUTAGE, True),
        (1.0, Priority.STEP_END, False),
        (1.0, Priority.LATE, False),
        (1.5, Priority.ARRIVAL, False),
    ],
)
def test_time_advances_unless_another_event_comes_first(when: float, priority: int, advances: bool) -> None:
    env = Environment()
    env.at(1.0, Priority.STEP_END)
    assert env.advance_to(when, priority) is advances
    assert env.now == (when if advances else 0.0)


@given(st.lists(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=4), min_size=1, max_size=20))
def test_an_alarm_happens_once_at_the_time_it_was_last_set_to(times: list[list[float]]) -> None:
    env, log = Environment(), []
    for index, moment in enumerate(times):
        alarm = Alarm(Priority.STEP_END + index, lambda now, index=index: log.append((now, env.now, index)))
        for when in moment:
            env.set(alarm, when)
    env.run()
    assert log == sorted((moment[-1], moment[-1], index) for index, moment in enumerate(times))


def test_an_alarm_may_be_set_again_when_it_happens() -> None:
    env, log = Environment(), []

    def ring(now: float) -> None:
        log.append((now, alarm.is_set))
        if now < 3.0:
            env.set(alarm, now + 1.0)

    alarm = Alarm(Priority.NORMAL, ring)
    env.set(alarm, 1.0)
    env.run()
    assert log == [(1.0, False), (2.0, False), (3.0, False)]
    assert not alarm.is_set


def test_an_alarm_that_is_unset_does_not_happen() -> None:
    env, log = Environment(), []
    alarm = Alarm(Priority.NORMAL, log.append)
    env.set(alarm, 1.0)
    alarm.unset()
    env.run()
    assert log == []


def test_alarms_and_events_of_an_instant_go_by_priority() -> None:
    env, log = Environment(), []

    def process(name: str, priority: int) -> Process:
        yield env.at(1.0, priority)
        log.append(name)

    env.process(process("late", Priority.LATE))
    env.set(Alarm(Priority.STEP_END, lambda now: log.append("step end")), 1.0)
    env.process(process("outage", Priority.OUTAGE))
    env.set(Alarm(Priority.ARRIVAL, lambda now: log.append("arrival")), 1.0)
    env.run()
    assert log == ["arrival", "outage", "step end", "late"]


def test_an_alarm_is_not_set_to_the_past() -> None:
    env = Environment()
    env.run(until=2.0)
    with pytest.raises(AssertionError, match=r"cannot wake at 1\.0: it is already 2\.0"):
        env.set(Alarm(Priority.NORMAL, lambda now: None), 1.0)


def test_time_advances_past_entries_of_an_alarm_that_was_set_to_another_time() -> None:
    env, log = Environment(), []
    alarm = Alarm(Priority.NORMAL, lambda now: log.append((now, env.advance_to(7.0, Priority.NORMAL), env.now)))
    env.set(alarm, 5.0)
    env.set(alarm, 1.0)
    env.run()
    assert log == [(1.0, True, 7.0)]
