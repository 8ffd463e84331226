"""Sessions on an engine with degenerate settings are queues with closed forms (`benchmarks.session_queues`)."""

from __future__ import annotations

import pytest

from benchmarks.queueing import finite_source_response
from benchmarks.session_queues import Closed, Open


@pytest.mark.parametrize(
    ("case", "requests", "replications", "width"),
    [
        pytest.param(Closed(6, 1), 800, 10, 0.05, marks=pytest.mark.slow),
        (Closed(9, 3), 800, 10, 0.05),
        pytest.param(Open(0.4, 1), 1200, 12, 0.1, marks=pytest.mark.slow),
        pytest.param(Open(0.6, 3), 1200, 12, 0.1, marks=pytest.mark.slow),
    ],
)
def test_the_mean_time_to_an_answer(case: Closed | Open, requests: int, replications: int, width: float) -> None:
    """Within the 99 % interval of the simulations, which must be narrow enough to show something."""
    expected, measured = case.expected(), case.measure(requests, replications, 0.99)
    assert abs(measured.mean - expected) <= measured.half_width < width * expected


def test_the_machine_repairman_by_hand() -> None:
    """One user never waits. Two users, one server, think and service of 1: p = (1, 2, 2)/5, so X = 4/5, R = 3/2."""
    assert finite_source_response(1, 3.0, 0.5) == pytest.approx(0.5)
    assert finite_source_response(2, 1.0, 1.0) == pytest.approx(1.5)
    assert finite_source_response(8, 1.0, 0.25, servers=8) == pytest.approx(0.25)
