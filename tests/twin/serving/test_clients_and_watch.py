"""Pauses of clients, and observers of the steps of a run."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from scenarios.serving import ClosedLoopSpec
from schedulers.batches import Batch
from tests.twin.serving.scenarios import plan_for
from twin.serving.engine.engine import Engine
from twin.serving.run.simulation import Simulation

from .scenarios import scenario


@pytest.mark.parametrize("cv", [0.25, 1.0, 2.0])
def test_pauses_have_the_mean_and_the_variation_that_are_asked_for(cv: float) -> None:
    spec = ClosedLoopSpec(process="closed_loop", concurrency=1, think=0.02, think_cv=cv)
    pause = spec.pauses(np.random.default_rng(5))
    sample = np.array([pause() for _ in range(100_000)])
    assert sample.mean() == pytest.approx(0.02, abs=4 * 0.02 * cv / np.sqrt(len(sample)))
    assert sample.std() / sample.mean() == pytest.approx(cv, rel=0.03)


def test_without_variation_every_pause_is_the_same() -> None:
    pause = ClosedLoopSpec(process="closed_loop", concurrency=1, think=0.02).pauses(np.random.default_rng(5))
    assert {pause() for _ in range(10)} == {0.02}


def test_a_variation_too_small_to_draw_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"at least 0\.001"):
        ClosedLoopSpec(process="closed_loop", concurrency=1, think=0.02, think_cv=1e-5)


def test_a_watch_sees_every_step_and_changes_none() -> None:
    plan = plan_for(scenario(fast_forward=False))
    observations: list[tuple[float, float, int]] = []

    def watch(engine: Engine, batch: Batch, start: float, end: float) -> None:
        observations.append((start, end, batch.tokens))

    watched, plain = Simulation(plan, watch=watch).run(), Simulation(plan).run()
    assert [end for _, end, _ in observations] == watched.logs[0].ends.tolist() == plain.logs[0].ends.tolist()
    assert sum(end - start for start, end, _ in observations) == pytest.approx(watched.logs[0].busy)
    assert all(tokens > 0 for _, _, tokens in observations)
