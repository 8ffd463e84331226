"""A machine whose speed changes while it serves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.twin.serving.scenarios import records, run, scenario
from twin.serving.machine_speed import MachineSpeed, SpeedLine


def test_a_broken_line_by_hand() -> None:
    line = SpeedLine([1.0, 2.0, 4.0], [1.0, 2.0, 0.5])
    assert [line.at(time) for time in (-5.0, 1.0, 1.5, 2.0, 3.0, 4.0, 9.0)] == [1.0, 1.0, 1.5, 2.0, 1.25, 0.5, 0.5]
    assert line.over(3.0, 2.0) == line.at(4.0)
    assert line.end(3.0, 1.0) == 3.875


def test_readings_are_averaged_with_their_neighbours() -> None:
    """Half as much again in the middle of seven; the nearest count threefold, the next twice."""
    line = SpeedLine.of([(float(i), seconds) for i, seconds in enumerate([2.0, 2.0, 2.0, 3.0, 2.0, 2.0, 2.0])], 2.0)
    half = 0.5
    assert line.factors == pytest.approx(
        [1.0, 1 + half / 8, 1 + half * 2 / 9, 1 + half * 3 / 9, 1 + half * 2 / 9, 1 + half / 8, 1.0]
    )
    assert SpeedLine.of([(3.0, 5.0)], 2.0).at(0.0) == 2.5
    assert SpeedLine.of([(3.0, 5.0), (4.0, 6.0)], 2.0).factors == pytest.approx([2.7, 2.8])


def test_a_reading_that_was_interrupted_counts_for_five_times_its_neighbours() -> None:
    """A thousand times as long, and a thousandth: neither is what the machine does for the steps around it."""
    among = [1.0, 1.0, 1.0, 1000.0, 1.0, 1.0, 1.0, 1.0, 0.001, 1.0, 1.0, 1.0]
    factors = SpeedLine.of([(float(i), seconds) for i, seconds in enumerate(among)], 1.0).factors
    assert max(factors) == pytest.approx(1 + 4 * 3 / 9)
    assert min(factors) == pytest.approx(1 - 0.8 * 3 / 9)
    lasting = [1.0] * 6 + [3.0] * 6
    assert SpeedLine.of([(float(i), seconds) for i, seconds in enumerate(lasting)], 1.0).at(9.0) == 3.0


def test_a_step_goes_by_the_yardstick_that_is_nearest_in_size() -> None:
    speed = MachineSpeed.of([(0.0, 8, 0.5), (0.5, 1, 0.3), (1.0, 8, 0.5)], {1: 0.1, 8: 0.5})
    assert {rows: speed.of_rows(rows).at(0.0) for rows in (1, 2, 3, 8, 500)} == pytest.approx(
        {1: 3.0, 2: 3.0, 3: 1.0, 8: 1.0, 500: 1.0}
    )
    assert speed.means() == pytest.approx({1: 3.0, 8: 1.0})
    assert speed.times_as_long(2.0).means() == pytest.approx({1: 6.0, 8: 2.0})
    assert MachineSpeed.of([], {}).of_rows(7).at(3.0) == 1.0


def test_steps_by_hand() -> None:
    """One request of four tokens whose every step takes 1 s, on a machine that slows down by half a second's worth a
    second."""
    document = scenario(
        workload={
            "requests": 1,
            "prefill": {"distribution": "fixed", "mean": 8},
            "decode": {"distribution": "fixed", "mean": 4},
            "arrivals": {"process": "deterministic", "rate": 1.0},
        },
        step_time={"overhead": 1.0, "per_token": 0.0, "per_kv_token": 0.0},
    )
    start = run(document).columns.arrival[0]
    speed = MachineSpeed({1: SpeedLine([start, start + 10.0], [1.0, 6.0])})
    ends, now = [], start
    for _ in range(4):
        now += 1.0 + 0.5 * (now + 0.5 - start)  # the speed in the middle of what would be the step
        ends.append(now)
    found = run(document, machine_speed=speed)
    assert found.logs[0].ends.tolist() == pytest.approx(ends)
    assert found.columns.last_token[0] == pytest.approx(ends[-1])


def test_twice_as_slow_is_half_the_speed_of_everything() -> None:
    """Every time doubles when arrivals and steps both take twice as long, to the last bit."""
    plain = records(run(scenario(workload={"arrivals": {"process": "poisson", "rate": 40.0}})))
    slow = records(
        run(
            scenario(workload={"arrivals": {"process": "poisson", "rate": 20.0}}),
            machine_speed=MachineSpeed({1: SpeedLine([0.0], [2.0])}),
        )
    )
    for name in ("arrival", "queued", "first_token", "last_token"):
        np.testing.assert_array_equal(2.0 * np.array(plain[name]), np.array(slow[name]))
