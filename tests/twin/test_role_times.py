"""Lines through recorded stretches of roles, and durations drawn from them."""

from __future__ import annotations

import numpy as np
import pytest

from latency_models.fitting.estimator import CannotFit
from twin.afd.bundle import Supply
from twin.afd.role_bundle import FEATURES, MessageSizes, RoleBundle, RoleBundleConfig, Stretch
from twin.afd.role_times import Part, RecordedWork, RoleTimes, SampledWork, TimedStretch


class LineWork:
    """Stretches that take exactly a line in their features, times a factor that is drawn for each."""

    def __init__(self, spread: float = 0.0) -> None:
        self.timed: list[TimedStretch] = []
        self._rng = np.random.default_rng(0)
        self._spread = spread

    def seconds(self, rank: int, stretch: Stretch) -> float:
        scale = 1 + self._spread * self._rng.uniform(-1, 1)
        seconds = scale * (1e-4 + 1e-6 * sum((i + 1) * feature for i, feature in enumerate(stretch.features)))
        self.timed.append(TimedStretch(rank, stretch.kind, stretch.features, seconds))
        return seconds


def config(x: int) -> RoleBundleConfig:
    return RoleBundleConfig(x, 4, 3, MessageSizes(64))


def supply(x: int, seed: int, completions: int = 60) -> Supply:
    rng = np.random.default_rng(seed)
    count = completions + 8 * x
    return Supply(rng.integers(1, 200, count), rng.integers(1, 30, count), None, completions)


def recorded(spread: float = 0.0) -> dict[Part, list[TimedStretch]]:
    parts = {}
    for x in (1, 3):
        work = LineWork(spread)
        RoleBundle(config(x), supply(x, seed=x), work).run()
        parts[Part(x, 0)] = work.timed
    return parts


def test_a_fit_to_lines_predicts_other_requests_exactly() -> None:
    times = RoleTimes(microbatches=2).fit(recorded())
    for x in (1, 3):
        load = supply(x, seed=7)
        exact = RoleBundle(config(x), load, LineWork()).run()
        records = RoleBundle(config(x), load, SampledWork(times, Part(x, 0), begin=0.5)).run()
        assert records.finished == exact.finished
        assert records.finish == pytest.approx(exact.finish, rel=1e-6)
    assert set(times.document()) == set(FEATURES)
    stage = times.document()["attention.stage"]["seconds"]
    assert stage["padded_tokens"] == pytest.approx(2e-6, rel=1e-3)
    assert times.mean("attention.stage", (4, 120)) == pytest.approx(1e-4 + 1e-6 * (4 + 240), rel=1e-6)


def test_scatter_keeps_its_mean_and_its_order() -> None:
    times = RoleTimes(microbatches=2).fit(recorded(spread=0.5))
    load = supply(3, seed=7)
    exact = RoleBundle(config(3), load, LineWork(0.5)).run().steps[-1][0]
    ends = [
        RoleBundle(config(3), load, SampledWork(times, Part(3, 0), draw / 4)).run().steps[-1][0] for draw in range(4)
    ]
    assert len(set(ends)) == 4
    assert np.mean(ends) == pytest.approx(exact, rel=0.03)
    without = RoleBundle(config(3), load, LineWork()).run().steps[-1][0]
    assert np.mean(ends) > 1.02 * without  # the FFN waits for the slowest of three instances


def test_kinds_and_rounds_that_were_not_recorded() -> None:
    parts = recorded()
    with pytest.raises(CannotFit, match=r"expected recorded stretches of kind ffn\.stage"):
        RoleTimes(2).fit({part: [s for s in rows if s.kind != "ffn.stage"] for part, rows in parts.items()})
    short = LineWork()
    RoleBundle(config(1), Supply(np.full(9, 5), np.full(9, 1), None, 1), short).run()
    with pytest.raises(CannotFit, match="expected more requests: 1A-1F ends no round"):
        RoleTimes(2).fit({Part(1, 0): short.timed, **parts} | {Part(1, 1): short.timed})


def test_recorded_work_sums_the_parts_between_readings_of_the_clock() -> None:
    work = RecordedWork({1: [1.0, 2.0, 4.0]})
    assert work.seconds(1, Stretch("attention.end", (1, 0), readings=1)) == 3.0
    assert work.seconds(1, Stretch("attention.wait")) == 4.0
    assert work.timed == [TimedStretch(1, "attention.end", (1, 0), 3.0), TimedStretch(1, "attention.wait", (), 4.0)]
